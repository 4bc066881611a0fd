"""The drafter's own K/V cache: one row of fixed capacity per request row.

Rows are the engine's request rows; nothing else is shared with the target's cache, so prefix hits, retraction
and restarts of the target need no coupling. Writes past the capacity land in the row's last slot, which no
query is allowed to read: a row that outgrows the drafter is refused drafts by its owner. Imports torch only.

Legend: N rows of a pass, R rows in all, C capacity, W window tokens, H K/V heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a cache. `capacity` is in tokens per row and includes the slot for overflow."""

    num_layers: int
    num_rows: int
    capacity: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * self.num_rows * self.capacity


class RowCache:
    """Keys and values of all layers, `[R, C, H, D]` each, zeroed so that unwritten slots are finite."""

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        size = (shape.num_rows, shape.capacity, shape.num_kv_heads, shape.head_dim)
        self.shape = shape
        self._keys = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]
        self._values = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]

    @property
    def usable(self) -> int:
        """Tokens a row can hold and read back."""
        return self.shape.capacity - 1

    def slots(self, start: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Slots `[N, num_tokens]` for tokens that start at position `start` `[N]`."""
        steps = torch.arange(num_tokens, device=start.device)
        return (start[:, None] + steps).clamp_(max=self.usable)

    def write(
        self, layer: int, rows: torch.Tensor, *, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store `k`, `v` `[N, W, H, D]` at `slots` `[N, W]` of `rows` `[N]`."""
        index = (rows[:, None], slots)
        self._keys[layer].index_put_(index, k)
        self._values[layer].index_put_(index, v)

    def prefix(self, layer: int, rows: torch.Tensor, *, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """First `length` slots of `rows` `[N]`: keys and values `[N, length, H, D]`."""
        return self._keys[layer][rows, :length], self._values[layer][rows, :length]
