"""The rounds of a server as JSON lines: what was drafted for which request and how much of it was accepted.

One line per round and row, written at once, so that a server that is stopped leaves a complete log.

Legend: N rows of a batch, B block size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from d3d_sglang.drafter.rows import RowBatch
from d3d_sglang.drafting import Ahead, Drafting
from d3d_sglang.spec_types import DraftProposal, VerifyResult
from tests.e2e.scripted.script import Scene


@dataclass(frozen=True)
class LoggedRound:
    """One verified block of one request row.

    Attributes:
        number: counts the rounds of the server; rows of one batch share it.
        scene: number of the scene in the script, None if the prompt is not in it.
        committed_len: tokens before the anchor; block: `[B]` anchor and candidates.
        prop_len: candidates the row really had; accept_len: how many of them stay.
        bonus: the token the target added.
        origin: where the candidates come from: redraft, hit, full, sibling or none.
    """

    number: int
    row: int
    scene: int | None
    committed_len: int
    block: list[int]
    prop_len: int
    accept_len: int
    bonus: int
    origin: str


def read_rounds(path: Path) -> list[LoggedRound]:
    """All rounds of a log in the order they ran."""
    return [LoggedRound(**json.loads(line)) for line in path.read_text().splitlines()]


def requests_of_scene(rounds: Iterable[LoggedRound], scene: Scene) -> list[list[LoggedRound]]:
    """Rounds of every request that had the scene's prompt, one request after the other.

    Under the overlap scheduler a request that has ended is in one more round, whose result nobody reads: such
    rounds are left out.
    """
    requests: list[list[LoggedRound]] = []
    for one in rounds:
        if one.scene != scene.number or one.committed_len + 1 >= len(scene.token_ids):
            continue
        if one.committed_len == len(scene.prompt_ids):
            requests.append([])
        requests[-1].append(one)
    return requests


class LoggedDrafting(Drafting):
    """Drafting that writes down every round. `path` is set once, before the worker is made."""

    path: Path

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._number = -1
        self._proposed: tuple[list[int], list[str]] = ([], [])  # prop_len, origin

    def propose(self, batch: RowBatch, indices: Sequence[int]) -> DraftProposal:
        """As in `Drafting`; keeps what `resolve` is not told."""
        origins = [origin.name.lower() for origin in self._store.origins(indices)]
        proposal = super().propose(batch, indices)
        self._number += 1
        self._proposed = (proposal.prop_len.tolist(), origins)
        return proposal

    def resolve(
        self, batch: RowBatch, block: torch.Tensor, ahead: Ahead | None, verify: VerifyResult
    ) -> None:
        """As in `Drafting`, and one line per row."""
        super().resolve(batch, block, ahead, verify)
        tensors = (batch.rows, batch.committed_len, block, verify.accept_len, verify.bonus)
        columns = (*(tensor.tolist() for tensor in tensors), *self._proposed)
        with self.path.open("a") as log:
            for row, committed_len, tokens, accept_len, bonus, prop_len, origin in zip(*columns, strict=True):
                logged = LoggedRound(
                    number=self._number,
                    row=row,
                    scene=self.rows.executor.scene_number(row),  # type: ignore[attr-defined]
                    committed_len=committed_len,
                    block=tokens,
                    prop_len=prop_len,
                    accept_len=accept_len,
                    bonus=bonus,
                    origin=origin,
                )
                log.write(json.dumps(asdict(logged)) + "\n")
