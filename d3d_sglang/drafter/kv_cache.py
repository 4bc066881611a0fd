"""The drafter's K/V memory: pages of tokens, and the table that says which pages a row has.

Which page belongs to whom is decided on the host by `page_pool.py`; this is the device side. The last page is
scratch: table entries without a page point to it, so a write past a row's pages harms nobody, and no query is
allowed to read it. Imports torch only.

Legend: N rows of a pass, R rows in all, W tokens, P prefix columns, H K/V heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a cache. `max_length` bounds a row in tokens; `num_pages` does not count the scratch page."""

    num_layers: int
    num_rows: int
    num_pages: int
    page_size: int
    max_length: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * (self.num_pages + 1) * self.page_size

    @property
    def pages_per_row(self) -> int:
        return -(-self.max_length // self.page_size)


class PagedCache:
    """Keys and values of all layers by slot (page * page_size + offset), zeroed so that all are finite."""

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self.shape = shape
        size = ((shape.num_pages + 1) * shape.page_size, shape.num_kv_heads, shape.head_dim)
        self._keys = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]
        self._values = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]
        self._scratch = shape.num_pages
        # One entry more than a row can have: positions past the end are clamped to it.
        table = (shape.num_rows, shape.pages_per_row + 1)
        self._table = torch.full(table, self._scratch, dtype=torch.int64, device=device)

    def assign(self, row: int, pages: Sequence[int], *, first: int) -> None:
        """Give `row` `pages` from page number `first` on; with `first` 0 it loses those it had."""
        if first == 0:
            self._table[row] = self._scratch
        if pages:
            index = torch.tensor(pages, dtype=torch.int64).to(self._table.device, non_blocking=True)
            self._table[row, first : first + len(pages)] = index

    def unassign_all(self) -> None:
        """Take all pages from all rows."""
        self._table.fill_(self._scratch)

    def slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots `[N, W]` of `positions` `[N, W]` in `rows` `[N]`."""
        page = (positions // self.shape.page_size).clamp(max=self.shape.pages_per_row)
        return self._table[rows[:, None], page] * self.shape.page_size + positions % self.shape.page_size

    def write(self, layer: int, slots: torch.Tensor, *, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store `k`, `v` `[N, W, H, D]` at `slots` `[N, W]`."""
        self._keys[layer].index_put_((slots,), k)
        self._values[layer].index_put_((slots,), v)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[N, P, H, D]` at `slots` `[N, P]`."""
        return self._keys[layer][slots], self._values[layer][slots]
