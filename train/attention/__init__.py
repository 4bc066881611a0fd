"""Attention of a packed training row under the two-interval mask, in four interchangeable implementations.

- `sdpa`: a dense boolean mask over PyTorch's SDPA. Any device; skips nothing; the reference.
- `flex`: PyTorch's FlexAttention. Trains on CUDA; skips tiles of 128 by 128.
- `flashinfer`: FlashInfer's custom-mask forward, which skips pages, and a Triton backward, which skips tiles.
- `triton`: the same backward behind a Triton forward, which skips tiles and runs full ones without the mask.
"""

from train.attention.plan import (
    ATTENTION_NAMES,
    AttentionName,
    AttentionPlan,
    implementation,
    make_plan,
    register,
)

__all__ = [
    "ATTENTION_NAMES",
    "AttentionName",
    "AttentionPlan",
    "implementation",
    "make_plan",
    "register",
]
