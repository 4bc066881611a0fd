"""Which tiles of a training layout's mask hold anything at all, and which are visible throughout.

A tile is `size` queries by `kv_size` keys. Bounds of ctx, lo and hi over every tile of queries are enough to
tell: keys before the smallest ctx are seen by all its queries, keys from the largest ctx on only through a
segment. With the context first and the blocks sorted by anchor this leaves 1.1 times the visible pairs; any
other order is as right and skips less. All of it is a few small operations on the device that never wait.

Legend: N rows, W tokens of a row, T tiles of queries, J tiles of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from d3d_sglang.layout import PackedLayout


@dataclass(frozen=True)
class QueryTiles:
    """Bounds over tiles of `size` successive queries, `[N, T]` int64; a last tile may reach past W."""

    size: int
    num_tokens: int  # W
    min_ctx: torch.Tensor
    max_ctx: torch.Tensor
    min_lo: torch.Tensor  # over queries that have a segment; W if there is none
    max_hi: torch.Tensor  # likewise; 0 if there is none

    @classmethod
    def of(cls, layout: PackedLayout, size: int) -> QueryTiles:
        """Bounds of every tile of `layout`, whose rows have no cached prefix."""
        num_tokens = layout.num_window
        has_segment = layout.lo < layout.hi
        lo = torch.where(has_segment, layout.lo, num_tokens)
        hi = torch.where(has_segment, layout.hi, 0)

        def tiles(x: torch.Tensor, filler: int) -> torch.Tensor:  # [N, T, size]
            return pad(x, (0, -num_tokens % size), value=filler).unflatten(1, (-1, size))

        return cls(
            size=size,
            num_tokens=num_tokens,
            min_ctx=tiles(layout.ctx, num_tokens).amin(2),
            max_ctx=tiles(layout.ctx, 0).amax(2),
            min_lo=tiles(lo, num_tokens).amin(2),
            max_hi=tiles(hi, 0).amax(2),
        )

    def visible(self, kv_size: int) -> torch.Tensor:
        """`[N, T, J]` bool: False only where no query of the tile sees any key of the other."""
        start = self._starts(kv_size)  # [J]
        in_context = start < self.max_ctx[..., None]
        in_segment = (start < self.max_hi[..., None]) & (self.min_lo[..., None] < start + kv_size)
        return in_context | in_segment

    def full(self, kv_size: int) -> torch.Tensor:
        """`[N, T, J]` bool: True where all of the queries exist and see all of the keys."""
        tile = torch.arange(self.min_ctx.shape[1], device=self.min_ctx.device)
        inside = (tile + 1) * self.size <= self.num_tokens  # [T]
        return (self._starts(kv_size) + kv_size <= self.min_ctx[..., None]) & inside[:, None]

    def ranges(self, kv_size: int) -> torch.Tensor:
        """`[N, T, 4]` int32: the tiles of keys a tile of queries has to visit, as a <= b <= c <= d.

        `[0, a)` are full as far as the queries exist, `[a, b)` and `[c, d)` need the mask, others are empty.
        """
        a = self.min_ctx // kv_size
        b = (self.max_ctx + kv_size - 1) // kv_size
        c = torch.maximum(b, self.min_lo // kv_size)
        d = torch.maximum(c, (self.max_hi + kv_size - 1) // kv_size)
        return torch.stack([a, b, c, d], dim=2).to(torch.int32)

    def _starts(self, kv_size: int) -> torch.Tensor:
        return torch.arange(0, self.num_tokens, kv_size, device=self.min_ctx.device)


def index_lists(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the last dimension of a bool tensor are True, `[...]`, and their indices first, `[..., X]`.

    Both int32 and contiguous. The indices are ascending; what follows the True ones is not to be read.
    """
    chosen = chosen.contiguous()  # results take over a transposed input's strides
    count = chosen.sum(-1, dtype=torch.int32)
    # A stable sort: ascending indices keep neighbouring memory together.
    index = (~chosen).to(torch.uint8).argsort(dim=-1, stable=True).to(torch.int32)
    return count, index
