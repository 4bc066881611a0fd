"""The rounds of a server as JSON lines: what was drafted for which request and how much of it was accepted.

One line per round and row, written at once, so that a server that is stopped leaves a complete log.

Legend: N rows of a batch, B block size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from d3d_sglang.drafter.rows import DrafterRows
from d3d_sglang.spec_types import DraftProposal
from tests.e2e.scripted.script import Scene


@dataclass(frozen=True)
class LoggedRound:
    """One verified block of one request row.

    Attributes:
        number: counts the rounds of the server; rows of one batch share it.
        scene: number of the scene in the script, None if the prompt is not in it.
        committed_len: tokens before the anchor; block: `[B]` anchor and candidates.
        prop_len: candidates the row really had; accept_len: how many of them stay.
    """

    number: int
    row: int
    scene: int | None
    committed_len: int
    block: list[int]
    prop_len: int
    accept_len: int


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


class LoggedRows(DrafterRows):
    """Drafting that writes down every committed round. `path` is set once, before the worker is made."""

    path: Path

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._number = -1
        self._drafted: tuple[list[int], list[int]] = ([], [])  # committed_len, prop_len

    def draft(self, rows: torch.Tensor, **inputs: Any) -> DraftProposal:
        """As in `DrafterRows`; keeps what `commit` is not told."""
        proposal = super().draft(rows, **inputs)
        self._number += 1
        self._drafted = (inputs["committed_len"].tolist(), proposal.prop_len.tolist())
        return proposal

    def commit(self, rows: torch.Tensor, block: torch.Tensor, *, accept_len: torch.Tensor) -> None:
        """As in `DrafterRows`, and one line per row."""
        super().commit(rows, block, accept_len=accept_len)
        columns = (rows.tolist(), *self._drafted, block.tolist(), accept_len.tolist())
        with self.path.open("a") as log:
            for row, committed_len, prop_len, tokens, accepted in zip(*columns, strict=True):
                logged = LoggedRound(
                    number=self._number,
                    row=row,
                    scene=self.executor.scene_number(row),  # type: ignore[attr-defined]
                    committed_len=committed_len,
                    block=tokens,
                    prop_len=prop_len,
                    accept_len=accepted,
                )
                log.write(json.dumps(asdict(logged)) + "\n")
