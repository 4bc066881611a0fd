"""The drafting side round by round against `reference.py`, over batches that change every round.

The reference knows neither caches nor rows nor packed passes. What is compared is every proposal, where it
came from, and what became of it.

Legend: B block size, C coverage, F fanout.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.drafting_session import NUM_ROWS, DraftingSession, pair, prompt

GRIDS = [(2, 1, 1), (2, 2, 1), (4, 3, 2), (5, 5, 1), (6, 3, 3)]  # B, C, F
LENGTHS = {1: 7, 3: 15, 4: 3, 5: 1}  # prompt length by row
NUM_TOKENS = 24


def decode_in_changing_batches(session: DraftingSession, *, seed: int) -> None:
    """Rows join one by one and leave when they have their tokens; every round takes some of them."""
    coins = random.Random(seed)
    waiting = list(LENGTHS.items())
    while True:
        if waiting and (not session.tokens or coins.random() < 0.3):
            row, length = waiting.pop(0)
            session.start(row, prompt(length, seed=seed))
        live = [row for row in session.tokens if len(session.output(row)) < NUM_TOKENS]
        if live:
            session.round(*coins.sample(live, k=coins.randint(1, len(live))))
        elif not waiting:
            return


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(("block_size", "coverage", "fanout"), GRIDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_rounds_agree_with_the_reference(
    mode: Any, block_size: int, coverage: int, fanout: int, seed: int
) -> None:
    session = DraftingSession(pair(seed), mode=mode, block_size=block_size, coverage=coverage, fanout=fanout)
    decode_in_changing_batches(session, seed=seed)
    for row in LENGTHS:
        session.assert_reference(row)
    session.rows.pool.check()


@settings(max_examples=20)
@given(data=st.data())
def test_any_batches_agree_with_the_reference(data: st.DataObject) -> None:
    session = DraftingSession(pair(data.draw(st.integers(0, 3))), block_size=4, coverage=4, fanout=2)
    rows = range(1, NUM_ROWS)
    for _ in range(data.draw(st.integers(1, 10))):
        starting = data.draw(st.none() | st.sampled_from(rows)) if session.tokens else 1
        if starting is not None:  # a new request, perhaps in the row of one that goes on no longer
            if starting in session.tokens:
                session.assert_reference(starting)
            session.start(starting, prompt(data.draw(st.integers(1, 12)), seed=data.draw(st.integers(0, 1))))
        session.round(*data.draw(st.lists(st.sampled_from(list(session.tokens)), min_size=1, unique=True)))
    for row in session.tokens:
        session.assert_reference(row)
    session.rows.pool.check()


def test_every_origin_occurs_and_the_text_is_always_the_targets() -> None:
    """Otherwise the agreement above would say little."""
    counts: Counter[tuple[str, str]] = Counter()
    followed: set[tuple[str, int]] = set()
    for seed in range(4):
        outputs = []
        for name, options in (
            ("sync", {"mode": "sync"}),
            ("redraft", {}),
            ("sibling", {"sibling": True}),
        ):
            session = DraftingSession(pair(seed), block_size=4, coverage=3, fanout=2, **options)
            decode_in_changing_batches(session, seed=seed)
            for row, rounds in session.rounds.items():
                session.assert_plain(row)
                counts.update((name, done.origin) for done in rounds)
                followed |= {(done.origin, done.accept_len) for done in rounds if name == "redraft"}
            outputs.append({row: session.output(row)[:NUM_TOKENS] for row in LENGTHS})
        assert outputs[0] == outputs[1] == outputs[2]
    assert {origin for name, origin in counts if name == "sync"} == {"redraft"}
    assert {origin for name, origin in counts if name == "redraft"} == {"redraft", "hit", "full"}
    assert {origin for name, origin in counts if name == "sibling"} == {"redraft", "hit", "full", "sibling"}
    assert counts["sibling", "redraft"] == 4 * len(LENGTHS), "a row waited after its first round"
    assert min(counts.values()) >= 5, counts
    assert {("full", 2), ("redraft", 3), ("hit", 3)} <= followed, "no full acceptance of each kind"


def started(**options: Any) -> DraftingSession:
    """Two rows in the middle of decoding."""
    session = DraftingSession(pair(0), **options)
    for row in (1, 2):
        session.start(row, prompt(9, seed=row))
    for _ in range(3):
        session.round(1, 2)
    return session


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_row_that_is_skipped_decodes_plainly_until_it_is_extended(mode: Any) -> None:
    session = started(mode=mode)
    session.rows.skip(1)
    for _ in range(4):
        session.round(1, 2)
    # What was waiting when it was skipped is verified: it is as good as ever.
    assert [done.prop_len for done in session.rounds[1][4:]] == [0] * 3
    if mode == "async":
        assert [done.origin for done in session.rounds[1][4:]] == ["none"] * 3
    session.assert_plain(1)
    session.assert_reference(2)
    so_far = session.tokens[1]
    session.start(1, so_far)
    for _ in range(4):
        session.round(2, 1)
    session.assert_reference(1)
    session.assert_reference(2)


def test_a_row_that_is_extended_forgets_what_was_waiting() -> None:
    session = started()
    again = session.prompts[1]
    # As long as the request before was by then, so that the length does not give the old proposal away.
    length = len(session.tokens[1]) - 1
    session.start(1, (again * 5)[:length])
    for _ in range(5):
        session.round(1, 2)
    assert session.rounds[1][0].origin == "redraft"
    session.assert_reference(1)
    session.assert_reference(2)


def test_a_stale_proposal_is_not_used() -> None:
    """Tokens were committed past the drafter: what waits was made for another length."""
    session = started(sibling=True)  # so that something always waits
    session.tokens[1].append(5)
    for _ in range(3):
        session.round(1, 2)
    assert [done.prop_len for done in session.rounds[1][3:]] == [0, 0, 0]
    assert [done.accept_len for done in session.rounds[1][3:]] == [0, 0, 0]
    assert session.rounds[1][-1].origin == "none"
    assert all(done.origin != "none" for done in session.rounds[2])
    session.assert_plain(2)


@pytest.mark.parametrize("sibling", [False, True])
def test_drafts_end_where_the_drafter_does(sibling: bool) -> None:
    """A block of B may start where B more positions are left, and not after."""
    limit, block_size = 24, 4
    session = DraftingSession(pair(1), block_size=block_size, sibling=sibling, max_positions=limit)
    session.start(1, prompt(7, seed=1))
    session.start(2, prompt(13, seed=2))
    starts: dict[int, list[int]] = {1: [], 2: []}
    for _ in range(30):
        for row in starts:
            starts[row].append(len(session.tokens[row]) - 1)
        session.round(1, 2)
    for row, lengths in starts.items():
        for committed_len, done in zip(lengths, session.rounds[row], strict=True):
            if committed_len + block_size > limit:
                assert (done.prop_len, done.origin) == (0, "none")
            elif done.origin != "sibling":
                assert done.prop_len == block_size - 1 - (done.origin == "full")
        assert lengths[-1] > limit + block_size
        session.assert_plain(row)
    assert session.start(1, prompt(limit - block_size + 1, seed=3)) == "too_long"
    assert session.start(2, prompt(limit - block_size, seed=3)) is None
    session.rows.pool.check()


def test_out_of_pages_a_row_decodes_plainly_and_the_other_as_ever() -> None:
    # Both prompts and what may follow take 6 and 7 of 15 pages.
    session = DraftingSession(pair(0), executor=pair(0).executor(4, num_pages=15))
    session.start(1, prompt(9, seed=1))
    session.start(2, prompt(13, seed=2))
    kept = []
    for _ in range(12):
        kept.append(
            session.drafting.keep(1, host_len=len(session.tokens[1]), token_ids=lambda: session.tokens[1])
        )
        session.round(1, 2)
        session.rows.pool.check()
    assert kept.count(False) <= 1, "it is said once"
    assert session.rows.pool.stats().failures > 0
    assert {0} < {done.prop_len for row in (1, 2) for done in session.rounds[row]}
    for row in (1, 2):
        session.assert_plain(row)


def test_a_row_that_begins_with_what_another_has_reads_only_the_rest() -> None:
    """Warm equals cold: the K/V that are found are those that would be computed."""
    tokens = prompt(22, seed=0)
    cold = DraftingSession(pair(2))
    cold.start(1, tokens)
    warm = DraftingSession(pair(2))
    warm.start(3, tokens[:18])
    for _ in range(2):
        warm.round(3)
    warm.start(1, tokens)
    assert warm.rows.pool.stats().shared_tokens == 16
    for _ in range(8):
        cold.round(1)
        warm.round(1, 3)
    assert warm.rounds[1] == cold.rounds[1]
    warm.assert_reference(1)
    warm.assert_reference(3)
    stats = warm.drafting.state()["pages"]
    assert (stats["shared_tokens"], stats["recomputed_tokens"]) == (16, 18 + 22 - 16)
