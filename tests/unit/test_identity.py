"""The figures of the identity bench, from answers made by hand."""

from __future__ import annotations

import pytest

from bench.answers import TIE_GAP, Answer, Comparison
from bench.identity import metrics_of, summarise
from bench.identity_runs import PLAIN_BATCH, REFERENCE, Run

DRAFTER, SCRIPTED = Run("drafter", "one"), Run("scripted", "one")


def answers(*histograms: tuple[int, ...]) -> list[Answer]:
    return [
        Answer(str(i), (1,), (2, 3, 4), top_two=(), accept_histogram=counts)
        for i, counts in enumerate(histograms)
    ]


SAME = Comparison("0", position=None, gap=None)
TIE = Comparison("1", position=2, gap=TIE_GAP / 2)
WRONG = Comparison("2", position=0, gap=None)


def test_summary_counts_and_tau() -> None:
    summary = summarise(DRAFTER, answers((3, 1), (), (0, 0, 2)), [SAME, TIE, WRONG])
    assert (summary.num_answers, summary.num_tokens) == (3, 9)
    assert (summary.identical, summary.excused, summary.mismatches) == (1, 1, 1)
    assert summary.accept_histogram == (3, 1, 2)
    # 6 rounds accepted 0 + 0 + 0 + 1 + 2 + 2 candidates, and each added a bonus.
    assert summary.tau == pytest.approx(11 / 6)


def test_metrics_are_those_of_the_d3d_servers() -> None:
    runs = {REFERENCE: [SAME], PLAIN_BATCH: [TIE], DRAFTER: [WRONG], SCRIPTED: [TIE]}
    histograms = {DRAFTER: (0, 0, 0, 5), SCRIPTED: (2, 0, 1)}
    metrics = metrics_of(
        {run: summarise(run, answers(histograms.get(run, ())), found) for run, found in runs.items()}
    )
    assert metrics == {
        "prompts": 1,
        "tokens": 6,
        "mismatches": 1,
        "excused_ties": 1,
        "plain_batch_differences": 1,
        "accept_lengths_seen": 2,
        "tau_drafter_one": 4.0,
        "tau_scripted_one": pytest.approx(5 / 3, abs=1e-4),
    }
