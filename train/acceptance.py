"""What a target would accept of a drafter's blocks, found without running the target (paper, section 3.4).

A greedy target says its answer whatever is drafted, so the drafts at every anchor of a known answer decide
all rounds of both modes: every context that a round reaches, and that of every branch that hits, is the
answer's own text. Pure: token ids in, counts out; knows neither models nor files.

Legend: T answer tokens r_1..r_T, the end token included; B block size; C coverage, F fanout; R ranks kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Origin = Literal["redraft", "hit", "full"]  # drafted on demand, ahead of a rejection, of full acceptance
ORIGINS: tuple[Origin, ...] = ("redraft", "hit", "full")


@dataclass(frozen=True, eq=False)
class AnswerDrafts:
    """An answer and what a drafter proposes at each of its anchors.

    Attributes:
        answer: `[T]`, T >= 2.
        ranked: `[T-1, B-1, R]`: [s-1, j-1] holds the likeliest ids for r_{s+j} at anchor s, best first.
    """

    answer: NDArray[np.integer]
    ranked: NDArray[np.integer]

    def __post_init__(self) -> None:
        shape = self.ranked.shape
        if self.answer.ndim != 1 or len(self.answer) < 2:
            raise ValueError(f"answer has shape {self.answer.shape}, it must be [T] with T of at least 2")
        if len(shape) != 3 or shape[0] != len(self.answer) - 1 or min(shape) < 1:
            raise ValueError(
                f"ranked has shape {shape}, it must be [{len(self.answer) - 1}, B-1, R] for an answer of "
                f"{len(self.answer)} tokens"
            )

    @property
    def block_size(self) -> int:
        """B."""
        return self.ranked.shape[1] + 1


@dataclass(frozen=True)
class WalkRound:
    """One verification.

    Attributes:
        anchor: s, 1-based: the last token committed before the round.
        prop_len: candidates it had, B-1 or B-2.
        accept_len: candidates that stood, not counting any past the end of the answer.
    """

    anchor: int
    prop_len: int
    accept_len: int
    origin: Origin


def sync_walk(drafts: AnswerDrafts) -> list[WalkRound]:
    """The rounds of synchronous drafting: every proposal is drafted on demand."""
    return _walk(drafts, covered=None, coverage=0)


def async_walk(drafts: AnswerDrafts, *, coverage: int, fanout: int) -> list[WalkRound]:
    """The rounds of drafting ahead with coverage C and fanout F, and on demand after a miss.

    Raises:
        ValueError: coverage outside 1..B, or a fanout that is not from 1 to R-1.
    """
    ranks = drafts.ranked.shape[2]
    if not 1 <= coverage <= drafts.block_size:
        raise ValueError(f"coverage is {coverage}, allowed are 1 to the block size {drafts.block_size}")
    if not 1 <= fanout < ranks:
        raise ValueError(f"fanout is {fanout}, allowed with {ranks} ranked ids are 1 to {ranks - 1}")
    alternatives = drafts.ranked[:, :, 1 : fanout + 1]  # [T-1, B-1, F]
    covered = (alternatives == _truth(drafts)[:, :, None]).any(axis=2)
    return _walk(drafts, covered=covered, coverage=coverage)


@dataclass(frozen=True)
class WalkCounts:
    """Rounds of walks over any number of answers; counts add up.

    Attributes:
        num_answers: walks.
        num_tokens: tokens that rounds made: T-1 an answer, since the first comes from the prefill.
        accept_histogram: `[B]`, rounds by accept length.
        reached: `[B-1]`, rounds in which candidate j was verified with all earlier ones accepted.
        accepted: `[B-1]`, those of them in which it stood.
        origins: `[3]`, rounds by the origin of their proposal, in the order of ORIGINS.
    """

    num_answers: int
    num_tokens: int
    accept_histogram: tuple[int, ...]
    reached: tuple[int, ...]
    accepted: tuple[int, ...]
    origins: tuple[int, int, int]

    @classmethod
    def none(cls, *, block_size: int) -> WalkCounts:
        """Counts of no walks."""
        candidates = (0,) * (block_size - 1)
        return cls(0, 0, (0,) * block_size, candidates, candidates, (0, 0, 0))

    @classmethod
    def of(cls, rounds: Sequence[WalkRound], *, answer_len: int, block_size: int) -> WalkCounts:
        """Counts of one walk."""
        histogram, reached, accepted = [0] * block_size, [0] * (block_size - 1), [0] * (block_size - 1)
        for walked in rounds:
            histogram[walked.accept_len] += 1
            verified = min(walked.prop_len, answer_len - walked.anchor, walked.accept_len + 1)
            for j in range(verified):
                reached[j] += 1
                accepted[j] += j < walked.accept_len
        by_origin = Counter(walked.origin for walked in rounds)
        redraft, hit, full = (by_origin[origin] for origin in ORIGINS)
        return cls(
            num_answers=1,
            num_tokens=answer_len - 1,
            accept_histogram=tuple(histogram),
            reached=tuple(reached),
            accepted=tuple(accepted),
            origins=(redraft, hit, full),
        )

    def __add__(self, other: WalkCounts) -> WalkCounts:
        redraft, hit, full = _sums(self.origins, other.origins)
        return WalkCounts(
            num_answers=self.num_answers + other.num_answers,
            num_tokens=self.num_tokens + other.num_tokens,
            accept_histogram=_sums(self.accept_histogram, other.accept_histogram),
            reached=_sums(self.reached, other.reached),
            accepted=_sums(self.accepted, other.accepted),
            origins=(redraft, hit, full),
        )

    @property
    def num_rounds(self) -> int:
        return sum(self.accept_histogram)

    @property
    def tau(self) -> float | None:
        """Output tokens a round, the first token of an answer not counted; None without rounds."""
        return self.num_tokens / self.num_rounds if self.num_rounds else None

    @property
    def hit_rate(self) -> float | None:
        """Share of verifications whose outcome had been drafted ahead; the last of an answer has none."""
        outcomes = self.num_rounds - self.num_answers
        return sum(self.origins[1:]) / outcomes if outcomes else None

    @property
    def position_acceptance(self) -> tuple[float | None, ...]:
        """`[B-1]`: share of candidates j that stood where all earlier ones had."""
        return tuple(
            accepted / reached if reached else None
            for accepted, reached in zip(self.accepted, self.reached, strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON form: the counts and what follows from them."""
        return {
            "tau": self.tau,
            "num_answers": self.num_answers,
            "num_tokens": self.num_tokens,
            "num_rounds": self.num_rounds,
            "accept_histogram": list(self.accept_histogram),
            "position_acceptance": list(self.position_acceptance),
            "reached": list(self.reached),
            "accepted": list(self.accepted),
            "origins": dict(zip(ORIGINS, self.origins, strict=True)),
            "hit_rate": self.hit_rate,
        }


@dataclass(frozen=True)
class Acceptance:
    """What a set of answers says about a drafter: both modes, pooled over the answers.

    Attributes:
        sync: rounds drafted on demand; its tau is the drafter's.
        ahead: rounds with branches for `coverage` accept lengths and `fanout` anchors each.
    """

    coverage: int
    fanout: int
    sync: WalkCounts
    ahead: WalkCounts

    @classmethod
    def none(cls, *, block_size: int, coverage: int, fanout: int) -> Acceptance:
        """Of no answers."""
        counts = WalkCounts.none(block_size=block_size)
        return cls(coverage=coverage, fanout=fanout, sync=counts, ahead=counts)

    @classmethod
    def of(cls, drafts: AnswerDrafts, *, coverage: int, fanout: int) -> Acceptance:
        """Of one answer."""
        lengths = {"answer_len": len(drafts.answer), "block_size": drafts.block_size}
        return cls(
            coverage=coverage,
            fanout=fanout,
            sync=WalkCounts.of(sync_walk(drafts), **lengths),
            ahead=WalkCounts.of(async_walk(drafts, coverage=coverage, fanout=fanout), **lengths),
        )

    def __add__(self, other: Acceptance) -> Acceptance:
        assert (self.coverage, self.fanout) == (other.coverage, other.fanout), "different branch sets"
        return Acceptance(self.coverage, self.fanout, self.sync + other.sync, self.ahead + other.ahead)

    @property
    def tau(self) -> float | None:
        """Of synchronous drafting; None without rounds."""
        return self.sync.tau

    @property
    def hit_rate(self) -> float | None:
        """Of drafting ahead; None without outcomes."""
        return self.ahead.hit_rate

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "coverage": self.coverage,
            "fanout": self.fanout,
            "sync": self.sync.to_dict(),
            "async": self.ahead.to_dict(),
        }


def mean_over_sets(values: Sequence[float | None]) -> float | None:
    """Plain mean of a figure of several sets, of those that have one."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _truth(drafts: AnswerDrafts) -> NDArray[np.int64]:
    """What every position should be, `[T-1, B-1]`: r_{s+j}, or -1 past the end."""
    num_anchors, num_candidates = drafts.ranked.shape[:2]
    padded = np.full(num_anchors + 1 + num_candidates, -1, np.int64)
    padded[: len(drafts.answer)] = drafts.answer
    windows = np.lib.stride_tricks.sliding_window_view(padded[1:], num_candidates)
    return windows[:num_anchors]


def _walk(drafts: AnswerDrafts, *, covered: NDArray[np.bool_] | None, coverage: int) -> list[WalkRound]:
    """All rounds; `covered` [s-1, j-1] says whether r_{s+j} is among the alternatives there, None: sync.

    A proposal is the block drafted at anchor `drafted_at`, from its candidate `skipped` (0-based) on. One
    candidate is skipped when the block was drafted ahead of full acceptance: it was the guess of the bonus.
    """
    end, num_candidates = len(drafts.answer), drafts.ranked.shape[1]
    right = drafts.ranked[:, :, 0] == _truth(drafts)  # [T-1, B-1]
    rounds = []
    drafted_at, skipped, origin = 1, 0, ORIGINS[0]
    while True:
        anchor = drafted_at + skipped
        stood = right[drafted_at - 1, skipped:]
        prop_len = num_candidates - skipped
        accept_len = prop_len if stood.all() else int(stood.argmin())
        rounds.append(WalkRound(anchor, prop_len, accept_len, origin))
        bonus_at = anchor + accept_len + 1
        if bonus_at >= end:
            return rounds
        full = accept_len == prop_len
        if covered is not None and full and right[bonus_at - 2, 0]:
            # The block at the last candidate guessed the bonus first.
            drafted_at, skipped, origin = bonus_at - 1, 1, "full"
            continue
        prepared = covered is not None and not full and accept_len < coverage - 1
        hit = prepared and covered[drafted_at - 1, skipped + accept_len]
        drafted_at, skipped, origin = bonus_at, 0, "hit" if hit else "redraft"


def _sums(ours: Sequence[int], theirs: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(ours, theirs, strict=True))
