"""The seed of every request row: the request's own, or a fresh one.

Legend: N rows of a batch, R rows in all.
"""

from __future__ import annotations

import secrets

import torch


class SeedRows:
    """Row-indexed seeds for the coins of `coins.py`; a request keeps its seed until its row starts anew."""

    def __init__(self, *, num_rows: int, device: torch.device) -> None:
        self._seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)  # [R]

    def begin(self, row: int, seed: int | None) -> None:
        """Set a row's seed; without one it is drawn from the operating system."""
        self._seeds[row] = secrets.randbits(63) if seed is None else seed % 2**63

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Seeds `[N]` of `rows` `[N]`."""
        return self._seeds[rows]
