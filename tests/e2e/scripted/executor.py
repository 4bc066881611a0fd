"""Stand-ins for the drafter's network and executor that read candidates from a script.

They have what `DrafterRows` uses of the real ones: a device, a cache shape, `prefill`, `draft`. Tokens go
through the host in every call, which a real drafter must never do.

Legend: N rows of a batch, R rows in all, B block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.e2e.scripted.script import Scene, Script


@dataclass(frozen=True)
class ScriptedModel:
    """A drafter without weights."""

    device: torch.device


@dataclass(frozen=True)
class ScriptedShape:
    """Size of a cache that holds nothing."""

    num_rows: int


@dataclass(frozen=True)
class ScriptedCache:
    """A cache that holds nothing; `usable` is the longest row it pretends to hold."""

    shape: ScriptedShape
    usable: int


class ScriptedExecutor:
    """Drafts by script; knows a row's scene from the tokens it was prefilled with."""

    def __init__(
        self, script: Script, *, num_rows: int, usable: int, block_size: int, device: torch.device
    ) -> None:
        self.model = ScriptedModel(device)
        self.cache = ScriptedCache(ScriptedShape(num_rows), usable)
        self.block_size = block_size
        self._script = script
        self._token_ids: list[list[int]] = [[] for _ in range(num_rows)]
        self._scenes: list[Scene | None] = [None] * num_rows

    def prefill(self, row: int, token_ids: Sequence[int], *, start: int) -> None:
        """Remember the tokens of `row` from position `start` on."""
        known = self._token_ids[row]
        assert start <= len(known), f"row {row} is read from {start} on, but has {len(known)} tokens"
        self._token_ids[row] = [*known[:start], *token_ids]
        self._scenes[row] = self._script.find(self._token_ids[row])

    def draft(
        self,
        rows: torch.Tensor,  # [N]
        block: torch.Tensor,  # [N, B]
        *,
        known_len: torch.Tensor,  # [N]
        prefix_len: torch.Tensor,  # [N]
        anchor: torch.Tensor,  # [N]
        max_prefix: int,
    ) -> torch.Tensor:
        """Candidates `[N, B-1]`."""
        committed_len = (prefix_len + known_len).tolist()
        # A real pass reads `max_prefix` cached tokens: a bound below a row's length would cut its context.
        assert max(prefix_len.tolist()) <= max_prefix, (
            f"prefix {prefix_len.tolist()} exceeds the bound {max_prefix}"
        )
        candidates = [
            self._script.candidates(self._scenes[row], length, block_size=self.block_size)
            for row, length in zip(rows.tolist(), committed_len, strict=True)
        ]
        return torch.tensor(candidates, device=self.model.device)

    def scene_number(self, row: int) -> int | None:
        """Number of the scene that `row` plays, None if its prompt is not in the script."""
        scene = self._scenes[row]
        return None if scene is None else scene.number
