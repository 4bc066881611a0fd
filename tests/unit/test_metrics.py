"""Counts of rounds, accept lengths and fall-backs."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3d_sglang.metrics import RoundStats

BLOCK_SIZE = 4


def test_nothing_counted_yet() -> None:
    assert RoundStats(block_size=BLOCK_SIZE).as_dict() == {
        "rounds": 0,
        "row_rounds": 0,
        "accepted_tokens": 0,
        "tau": None,
        "accept_length_histogram": [0, 0, 0, 0],
        "fallbacks": {},
    }


@given(st.lists(st.lists(st.integers(0, BLOCK_SIZE - 1), min_size=1), min_size=1))
def test_counts_are_those_of_the_rounds(rounds: list[list[int]]) -> None:
    stats = RoundStats(block_size=BLOCK_SIZE)
    for accept_lens in rounds:
        stats.record_round(accept_lens)
    counts = stats.as_dict()
    every = [k for accept_lens in rounds for k in accept_lens]
    assert counts["rounds"] == len(rounds)
    assert counts["row_rounds"] == len(every)
    assert counts["accepted_tokens"] == sum(every)
    assert counts["accept_length_histogram"] == [every.count(k) for k in range(BLOCK_SIZE)]
    assert counts["tau"] == pytest.approx(sum(k + 1 for k in every) / len(every))
    json.dumps(counts)


def test_a_fallback_is_logged_once_per_reason_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    stats = RoundStats(block_size=BLOCK_SIZE)
    with caplog.at_level(logging.WARNING):
        stats.record_fallback("too_long", "130 tokens")
        stats.record_fallback("too_long", "140 tokens")
        stats.record_fallback("input_embeds", "no ids")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "too_long" in messages[0] and "130 tokens" in messages[0]
    assert "input_embeds" in messages[1]
    assert stats.as_dict()["fallbacks"] == {"too_long": 2, "input_embeds": 1}


def test_reading_does_not_lend_out_the_counters() -> None:
    stats = RoundStats(block_size=BLOCK_SIZE)
    stats.as_dict()["accept_length_histogram"][0] = 99
    assert stats.as_dict()["accept_length_histogram"] == [0, 0, 0, 0]
