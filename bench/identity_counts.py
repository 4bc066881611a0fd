"""What the servers of the identity bench count: rounds by where their proposal comes from, and outcomes.

Counts are kept for every session, the time a server spent on one run between a start and an interruption, so
that those of an interrupted run are whole. Knows nothing of tokens.

Legend: B block size.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.scripted.round_log import LoggedRound

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Counts:
    """Numbers that add up; those after `fallbacks` are known with the scripted drafter alone.

    Attributes:
        origins: (row, round) pairs by the origin of their proposal, as `/d3d/state` names them.
        fallbacks: rows that decoded without drafts, by reason.
        hits: rejections drafted ahead, by the number of candidates accepted; misses: the others.
        fulls: full acceptances drafted ahead, by the number of candidates there were; lost: the others.
    """

    origins: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    hits: Counter[int] = field(default_factory=Counter)
    misses: Counter[int] = field(default_factory=Counter)
    fulls: Counter[int] = field(default_factory=Counter)
    lost: Counter[int] = field(default_factory=Counter)

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))

    def __sub__(self, earlier: Counts) -> Counts:
        return Counts(*(getattr(self, part.name) - getattr(earlier, part.name) for part in fields(self)))

    def to_dict(self) -> dict[str, dict[Any, int]]:
        """JSON-ready; `dataclasses.asdict` would spoil the counters."""
        return {part.name: dict(sorted(getattr(self, part.name).items())) for part in fields(self)}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Counts:
        """Inverse of `to_dict`, through JSON, which makes texts of numbers."""
        named = {name: Counter(stored[name]) for name in ("origins", "fallbacks")}
        numbered = {
            name: Counter({int(key): count for key, count in stored[name].items()})
            for name in ("hits", "misses", "fulls", "lost")
        }
        return cls(**named, **numbered)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Session:
    """A server's work on one run, or on what was left of it. `options` are those the server says it has."""

    num_answers: int
    seconds: float
    counts: Counts
    options: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**vars(self), "counts": self.counts.to_dict()}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Session:
        """Inverse of `to_dict`, through JSON."""
        return cls(**{**stored, "counts": Counts.from_dict(stored["counts"])})


class SessionStore:
    """The sessions of one run, each in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def all(self) -> list[Session]:
        """Every session kept, in any order."""
        return [Session.from_dict(json.loads(path.read_text())) for path in self._folder.glob("*.json")]

    def new(self) -> Path:
        """Where a session that starts now may be kept."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{len(list(self._folder.iterdir()))}.json"

    @staticmethod
    def keep(path: Path, session: Session) -> None:
        """Write a session, in place of what was known of it earlier."""
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(session.to_dict()))
        unfinished.replace(path)


def server_state(url: str) -> dict[str, Any]:
    """What `/d3d/state` says of a server's one worker.

    Raises:
        httpx.HTTPStatusError: the server has no such route.
    """
    response = httpx.get(f"{url}/d3d/state", timeout=TIMEOUT_S, trust_env=False).raise_for_status()
    (worker,) = response.json()["workers"]
    return dict(worker)


def counts_of(state: dict[str, Any], rounds: Iterable[LoggedRound] = ()) -> Counts:
    """Counts of a server since its start, from its state and its log of rounds."""
    named = Counts(origins=Counter(state["row_rounds_by_origin"]), fallbacks=Counter(state["fallbacks"]))
    return named + outcomes(rounds)


def outcomes(rounds: Iterable[LoggedRound]) -> Counts:
    """How rounds ended and whether that was drafted ahead, which the same row's next round tells."""
    counts = Counts()
    before: dict[int, LoggedRound] = {}
    for one in rounds:
        last = before.get(one.row)
        before[one.row] = one
        if last is None or not _follows(last, one):
            continue
        is_full = last.accept_len == last.prop_len
        if one.origin in ("hit", "full"):
            (counts.fulls if is_full else counts.hits)[last.accept_len] += 1
        elif one.origin in ("redraft", "sibling"):
            (counts.lost if is_full else counts.misses)[last.accept_len] += 1
    return counts


def _follows(last: LoggedRound, one: LoggedRound) -> bool:
    """Whether `one` goes on where `last` ended, in the same request of a known prompt."""
    if one.scene is None or one.scene != last.scene:
        return False
    return one.committed_len == last.committed_len + last.accept_len + 1


def read_log(path: Path) -> Sequence[LoggedRound]:
    """Rounds of a log that a server may be writing: a line it has not finished is left out."""
    text = path.read_text() if path.is_file() else ""
    return [LoggedRound(**json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]
