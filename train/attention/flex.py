"""Training attention by PyTorch's FlexAttention: compiled forward and backward on CUDA, skipping by tiles.

The block mask is made from the bounds of tiles, not by evaluating all pairs: tiles of 128 by 128 that nothing
can be seen in are skipped, fully visible ones run without the rule, the others evaluate it. On a CPU torch
has the eager forward only (it refuses tensors that require a gradient).

Legend: N rows, W tokens of a row, H query heads, G K/V heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from d3d_sglang.layout import PackedLayout
from d3d_sglang.masks import visible
from train.attention.tiles import QueryTiles, index_lists

TILE = 128

# One function for all layers and plans, so that kernels are compiled once per kind of shape. On the second
# compilation torch turns sizes that changed (N, W) into symbols.
_compiled_flex_attention = torch.compile(flex_attention)


@dataclass(frozen=True)
class FlexPlan:
    """The block mask of a micro-batch."""

    name: ClassVar[str] = "flex"

    block_mask: BlockMask

    @classmethod
    def make(cls, layout: PackedLayout) -> FlexPlan:
        """Sort the layout's tiles into empty, full and partial ones."""
        ctx, lo, hi = layout.ctx, layout.lo, layout.hi

        def rule(row: torch.Tensor, _head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return visible(ctx[row, q], lo[row, q], hi[row, q], k)

        tiles = QueryTiles.of(layout, TILE)
        full = tiles.full(TILE)[:, None]  # [N, 1, T, T]
        partial = tiles.visible(TILE)[:, None] & ~full
        return cls(
            block_mask=BlockMask.from_kv_blocks(
                *index_lists(partial),
                *index_lists(full),
                BLOCK_SIZE=TILE,
                mask_mod=rule,
                seq_lengths=(layout.num_window, layout.num_window),
            )
        )

    def attend(
        self,
        query: torch.Tensor,  # [N, H, W, D]
        key: torch.Tensor,  # [N, G, W, D]
        value: torch.Tensor,  # [N, G, W, D]
        *,
        scaling: float,
    ) -> torch.Tensor:
        """Attention `[N, W, H, D]`."""
        attention = _compiled_flex_attention if query.is_cuda else flex_attention
        out = attention(
            query,
            key,
            value,
            block_mask=self.block_mask,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2)
