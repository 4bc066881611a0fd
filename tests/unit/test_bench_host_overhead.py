"""The benchmark of a round's host cost: what it subtracts, and a limit for any machine."""

from __future__ import annotations

import pytest

from bench.host_overhead import (
    KINDS,
    NO_VOCAB,
    VOCAB_SIZE,
    GreedyRows,
    Round,
    count_ops,
    measure,
    metrics_of,
)
from d3d_sglang.spec_types import Origin

# Torch operations of a greedy round by kind, views and no-op conversions included. Each costs the host 1 us
# and more, 5 us where it launches a kernel. Raising a limit needs figures of `python -m bench.host_overhead`.
MAX_OPS = {"sync": 63, "hit": 138, "miss": 164}


@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_takes_no_more_operations_than_it_did(kind: str, num_rows: int) -> None:
    ops = count_ops(num_rows, kind=kind)
    assert ops["aten.argmax.default"] >= 1, "the round did not choose"
    assert ops.total() <= MAX_OPS[kind], "\n".join(f"{count:3} {name}" for name, count in ops.most_common())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("sync", {Origin.REDRAFT: 12}),
        ("hit", {Origin.REDRAFT: 4, Origin.HIT: 8}),
        ("miss", {Origin.REDRAFT: 8, Origin.HIT: 4}),
    ],
)
def test_rounds_are_of_their_kind(kind: str, expected: dict[Origin, int]) -> None:
    rows = GreedyRows(4, kind=kind, vocab_size=NO_VOCAB, num_rounds=3)
    for _ in range(3):
        rows.round()
    assert rows.rig.worker.drafting.origins == expected
    assert rows.rig.worker.state()["fallbacks"] == {}


def test_stubs_and_choice_are_subtracted_and_medians_taken() -> None:
    rounds = [Round(total=total, drafter=10.0, target=20.0, choice=5.0) for total in (130.0, 430.0, 230.0)]
    assert metrics_of(rounds, kind="sync", num_rows=1, vocab_size=NO_VOCAB) == {"extra_ms_b1": 0.2}
    assert metrics_of(rounds, kind="hit", num_rows=16, vocab_size=VOCAB_SIZE) == {
        "hit_cold_extra_ms_b16": 0.195,
        "hit_choice_ms_b16": 0.005,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_are_measured_after_the_warm_up(kind: str) -> None:
    rounds = measure(2, kind=kind, vocab_size=NO_VOCAB, num_rounds=3, num_warmup=2)
    assert len(rounds) == 3
    for done in rounds:
        assert 0 < done.drafter < done.total and 0 < done.target < done.total
        assert 0 < done.choice < done.extra < done.total
