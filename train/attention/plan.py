"""Training attention as transformers sees it: names, registration, and the plan of a micro-batch.

The packed mask of a micro-batch is the same in all layers. A plan is made from the layout once, travels
through the model as the forward keyword argument `attention_plan`, and each layer attends through it.

Legend: N rows, W tokens of a row, H query heads, G K/V heads, D head size.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal, Protocol, get_args

import torch
from transformers import AttentionInterface

from d3d_sglang.layout import PackedLayout
from train.attention.sdpa import SdpaPlan

AttentionName = Literal["sdpa", "flex", "flashinfer", "triton"]
ATTENTION_NAMES: tuple[AttentionName, ...] = get_args(AttentionName)


class AttentionPlan(Protocol):
    """What a micro-batch's layers share."""

    name: ClassVar[str]

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float
    ) -> torch.Tensor:
        """Attention `[N, W, H, D]` of query `[N, H, W, D]` over key and value `[N, G, W, D]`."""
        ...


def make_plan(
    name: AttentionName,
    layout: PackedLayout,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    scaling: float | None = None,
) -> AttentionPlan:
    """Plan the attention of a micro-batch, on the layout's device.

    Every token must see at least itself, padding included, and no row has a cached prefix; neither is
    checked, since that would wait for the device. Only "flashinfer" waits for it, once.

    Args:
        layout: context first, then blocks sorted by anchor: any other order is as right but skips less.
        dtype: of query, key and value.
        scaling: the model's factor on the scores; `head_dim ** -0.5` if not given.

    Raises:
        ValueError: unknown name, heads that do not divide, a head size, type or device the
            implementation has no kernel for.
    """
    if name not in ATTENTION_NAMES:
        raise ValueError(f"attention {name!r} is unknown; it may be one of {ATTENTION_NAMES}")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
    # Imported on use: a machine that trains with SDPA loads no kernel compiler, and Triton decides when it
    # is first imported whether it compiles or interprets.
    match name:
        case "sdpa":
            return SdpaPlan.make(layout)
        case "flex":
            from train.attention.flex import FlexPlan

            return FlexPlan.make(layout)
        case "triton":
            from train.attention.triton_forward import TritonPlan

            return TritonPlan.make(layout, head_dim=head_dim, dtype=dtype)
        case "flashinfer":
            if layout.ctx.device.type != "cuda":
                raise ValueError(f"attention 'flashinfer' needs a CUDA device, not {layout.ctx.device}")
            from train.attention.flashinfer import FlashInferPlan

            return FlashInferPlan.make(
                layout,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                dtype=dtype,
                scaling=head_dim**-0.5 if scaling is None else scaling,
            )


def implementation(name: AttentionName) -> str:
    """The `attn_implementation` of a transformers model that attends by plans of this name."""
    # transformers takes any name with "flash" in it for a FlashAttention package to import.
    return f"d3d_train_{name.replace('flash', 'f')}"


def register() -> None:
    """Make all training attentions known to transformers; safe to call again."""
    for name in ATTENTION_NAMES:
        AttentionInterface.register(implementation(name), partial(_attention, name))


def _attention(
    name: AttentionName,
    module: torch.nn.Module,
    query: torch.Tensor,  # [N, H, W, D]
    key: torch.Tensor,  # [N, G, W, D]
    value: torch.Tensor,  # [N, G, W, D]
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    attention_plan: AttentionPlan,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: `[N, W, H, D]` and no weights."""
    assert attention_mask is None, "the plan carries the mask"
    assert attention_plan.name == name, f"a plan for {attention_plan.name} in a model set to {name}"
    if options.get("sliding_window") is not None:
        raise ValueError(f"sliding_window is {options['sliding_window']}; training attends without one")
    return attention_plan.attend(query, key, value, scaling=scaling), None
