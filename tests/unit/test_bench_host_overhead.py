"""The benchmark of a round's host cost: what it subtracts, and a limit for any machine."""

from __future__ import annotations

import pytest

from bench.host_overhead import NO_VOCAB, VOCAB_SIZE, Round, count_ops, measure, metrics_of

# Torch operations of a greedy round, views and no-op conversions included. Each costs the host 1 us and more,
# 5 us where it launches a kernel. Raising the limit needs figures from `python -m bench.host_overhead`.
MAX_OPS = 61


@pytest.mark.parametrize("num_rows", [1, 16])
def test_a_round_takes_no_more_operations_than_it_did(num_rows: int) -> None:
    ops = count_ops(num_rows)
    assert ops["aten.argmax.default"] == 1, "the round did not choose"
    assert ops.total() <= MAX_OPS, "\n".join(f"{count:3} {name}" for name, count in ops.most_common())


def test_stubs_and_choice_are_subtracted_and_medians_taken() -> None:
    rounds = [Round(total=total, drafter=10.0, target=20.0, choice=5.0) for total in (130.0, 430.0, 230.0)]
    assert metrics_of(rounds, num_rows=1, vocab_size=NO_VOCAB) == {"extra_ms_b1": 0.2}
    assert metrics_of(rounds, num_rows=16, vocab_size=VOCAB_SIZE) == {
        "cold_extra_ms_b16": 0.195,
        "choice_ms_b16": 0.005,
    }


def test_rounds_are_measured_after_the_warm_up() -> None:
    rounds = measure(2, vocab_size=NO_VOCAB, num_rounds=3, num_warmup=2)
    assert len(rounds) == 3
    for done in rounds:
        assert 0 < done.drafter < done.total and 0 < done.target < done.total
        assert 0 < done.choice < done.extra < done.total
