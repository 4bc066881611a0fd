"""What the runs of the identity bench come to: sums of a run, the record's metrics, what they fall short of.

Pure; asks nobody and writes nothing.

Legend: B block size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from bench.answers import Answer, Comparison
from bench.identity_counts import Counts, Session
from bench.identity_plan import PLAIN, PLAIN_BATCH, REFERENCE, Run

# What all runs together must have met, beside every accept length and every position of hits and misses.
AT_LEAST = {
    "hits": 200,
    "misses": 200,
    "siblings": 50,
    "fulls": 50,
    "fulls_of_b_minus_1": 1,
    "fulls_of_b_minus_2": 1,
}


@dataclass(frozen=True)
class Summary:
    """What one run came to, beside the reference answers. `tau` is None on a plain server."""

    run: Run
    num_answers: int
    num_tokens: int
    identical: int
    excused: int
    mismatches: int
    accept_histogram: tuple[int, ...]
    counts: Counts

    @property
    def tau(self) -> float | None:
        """Tokens a round adds to a request, the bonus included."""
        rounds = sum(self.accept_histogram)
        accepted = sum(length * count for length, count in enumerate(self.accept_histogram))
        return round(1 + accepted / rounds, 4) if rounds else None

    @property
    def misses(self) -> int:
        """Outcomes that were not drafted ahead; the first draft of an answer follows no outcome."""
        if not self.run.server.is_async:
            return 0
        origins = self.counts.origins
        return max(origins["redraft"] + origins["sibling"] - self.num_answers, 0)

    def __str__(self) -> str:
        tau = "" if self.tau is None else f", tau {self.tau:.2f}"
        return f"{self.run}, {self.num_answers} answers, {self.mismatches} differ, {self.excused} ties{tau}"


def summarise(
    run: Run, answers: Sequence[Answer], comparisons: Sequence[Comparison], sessions: Sequence[Session]
) -> Summary:
    """Count one run's answers and how they compare."""
    histograms = (answer.accept_histogram for answer in answers)
    identical = sum(comparison.identical for comparison in comparisons)
    excused = sum(comparison.excused for comparison in comparisons)
    return Summary(
        run=run,
        num_answers=len(answers),
        num_tokens=sum(len(answer.output_ids) for answer in answers),
        identical=identical,
        excused=excused,
        mismatches=len(comparisons) - identical - excused,
        accept_histogram=tuple(sum(counts) for counts in zip_longest(*histograms, fillvalue=0)),
        counts=sum((session.counts for session in sessions), Counts()),
    )


def metrics_of(summaries: Mapping[Run, Summary], *, block_size: int) -> dict[str, float | int]:
    """The record's metrics, of the runs there are; tokens, ties and mismatches are those of D3D servers."""
    d3d = [summary for run, summary in summaries.items() if run.server != PLAIN]
    scripted = [summary for summary in d3d if summary.run.server.drafter == "scripted"]
    counts = sum((summary.counts for summary in d3d), Counts())
    lengths = {length for one in scripted for length, count in enumerate(one.accept_histogram) if count}
    metrics: dict[str, float | int] = {
        "prompts": summaries[REFERENCE].num_answers,
        "tokens": sum(summary.num_tokens for summary in d3d),
        "mismatches": sum(summary.mismatches for summary in d3d),
        "excused_ties": sum(summary.excused for summary in d3d),
        "accept_lengths_seen": len(lengths),
        "hits": counts.origins["hit"],
        "misses": sum(summary.misses for summary in d3d),
        "siblings": counts.origins["sibling"],
        "fulls": counts.origins["full"],
        "undrafted": counts.origins["none"],
        "hit_positions_seen": len(counts.hits),
        "miss_positions_seen": len(counts.misses),
        "fulls_of_b_minus_1": counts.fulls[block_size - 1],
        "fulls_of_b_minus_2": counts.fulls[block_size - 2],
    }
    if PLAIN_BATCH in summaries:
        batch = summaries[PLAIN_BATCH]
        metrics["plain_batch_differences"] = batch.excused + batch.mismatches
    for summary in d3d:
        if summary.tau is not None:
            metrics[f"tau_{str(summary.run).replace('-', '_')}"] = summary.tau
    return metrics


def shortcomings(metrics: Mapping[str, float | int], *, block_size: int) -> list[str]:
    """What a complete record should have met and has not."""
    positions = dict.fromkeys(("hit_positions_seen", "miss_positions_seen"), block_size - 1)
    wanted = {**AT_LEAST, "accept_lengths_seen": block_size, **positions}
    return [
        f"{name} is {metrics[name]}, wanted are at least {least}"
        for name, least in wanted.items()
        if metrics[name] < least
    ]
