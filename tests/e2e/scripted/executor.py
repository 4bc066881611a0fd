"""Stand-ins for the drafter's network and executor that read candidates from a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from d3d_sglang.drafter.kv_cache import PagedCache
from tests.e2e.scripted.script import Scene, Script
from tests.e2e.scripted.token_executor import TokenExecutor


@dataclass(frozen=True)
class ScriptedModel:
    """A drafter without weights, as its cache and rows see it: the K/V of a token is one number."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    num_layers: int = 1
    num_kv_heads: int = 1
    head_dim: int = 1


class ScriptedExecutor(TokenExecutor):
    """Drafts by script; knows a row's scene from the tokens that are there after a prefill."""

    def __init__(self, model: Any, cache: PagedCache, *, script: Script, **sizes: int) -> None:
        super().__init__(model, cache, **sizes)
        self._script = script
        self._scenes: list[Scene | None] = [None] * cache.shape.num_rows

    def prefill(self, row: int, token_ids: Sequence[int], *, start: int) -> None:
        """Read tokens; those before `start` are in pages that another row may have written."""
        super().prefill(row, token_ids, start=start)
        rows = torch.tensor([row], device=self.model.device)
        self._scenes[row] = self._script.find(self.history(rows, start + len(token_ids))[0])

    def ranked(self, row: int, tokens: list[int]) -> list[list[int]]:
        """What the script says after the last of `tokens`."""
        return self._script.ranked(
            self._scenes[row],
            len(tokens) - 1,
            anchor=tokens[-1],
            block_size=self.block_size,
            support=self.support,
        )

    def scene_number(self, row: int) -> int | None:
        """Number of the scene that `row` plays, None if its prompt is not in the script."""
        scene = self._scenes[row]
        return None if scene is None else scene.number
