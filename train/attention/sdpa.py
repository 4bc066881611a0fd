"""Training attention as one dense boolean mask over PyTorch's SDPA: right on every device, skips nothing.

The reference for the other implementations, what runs on a CPU, and the baseline of the benchmarks. The work
is that of a dense mask, 3.5 to 5 times what is visible at the usual sizes, and so is the mask's memory.

Legend: N rows, W tokens of a row, H query heads, G K/V heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from d3d_sglang.layout import PackedLayout
from d3d_sglang.masks import dense_mask


@dataclass(frozen=True)
class SdpaPlan:
    """The mask of a micro-batch."""

    name: ClassVar[str] = "sdpa"

    mask: torch.Tensor  # [N, 1, W, W] bool

    @classmethod
    def make(cls, layout: PackedLayout) -> SdpaPlan:
        """Render the layout's mask."""
        return cls(mask=dense_mask(layout, max_prefix=0)[:, None])

    def attend(
        self,
        query: torch.Tensor,  # [N, H, W, D]
        key: torch.Tensor,  # [N, G, W, D]
        value: torch.Tensor,  # [N, G, W, D]
        *,
        scaling: float,
    ) -> torch.Tensor:
        """Attention `[N, W, H, D]`."""
        group = query.shape[1] // key.shape[1]
        # Repeated, as transformers does: with a mask SDPA's fast kernels do not share K/V between heads.
        key, value = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (key, value))
        out = scaled_dot_product_attention(query, key, value, attn_mask=self.mask, scale=scaling)
        return out.transpose(1, 2)
