"""The page pool: random scheduler events against a model, each edge case alone, and its cost per round."""

from __future__ import annotations

import time

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from d3d_sglang.drafter.page_pool import Grant, PagePool, PoolStats
from tests.unit.page_pool_model import NUM_ROWS, Scheduler

EVENTS = 10_000
STEPS = 50


def test_random_scheduler_events() -> None:
    Scheduler.events = 0
    # Some examples end early or are drawn twice, hence more of them than EVENTS / STEPS.
    many = settings(max_examples=2 * EVENTS // STEPS, stateful_step_count=STEPS, deadline=None, database=None)
    run_state_machine_as_test(Scheduler, settings=many)  # type: ignore[no-untyped-call]
    assert Scheduler.events >= EVENTS


def begin(pool: PagePool, row: int, tokens: range | list[int], *, reserve: int = 0) -> Grant:
    grant = pool.begin(row, tokens, generation=row, reserve=reserve)
    assert grant is not None
    pool.check()
    return grant


def begin_and_publish(pool: PagePool, row: int, tokens: range | list[int], *, reserve: int = 0) -> Grant:
    grant = begin(pool, row, tokens, reserve=reserve)
    pool.publish(row, tokens, safe_len=len(tokens))
    pool.check()
    return grant


def make(num_pages: int = 8, page_size: int = 4) -> PagePool:
    return PagePool(num_pages=num_pages, page_size=page_size, num_rows=NUM_ROWS)


@pytest.mark.parametrize(
    ("prompt_len", "again", "shared_len"),
    [
        (10, 10, 8),  # the partial last page is private
        (8, 8, 8),  # equal to a published run: nothing to compute
        (3, 3, 0),  # shorter than a page
        (
            12,
            9,
            8,
        ),  # the published page that reaches past the prompt is not used: the row would write into it
        (8, 12, 8),
    ],
)
def test_prompt_seen_before(prompt_len: int, again: int, shared_len: int) -> None:
    pool = make()
    first = begin_and_publish(pool, 0, range(prompt_len))
    second = begin(pool, 1, range(again), reserve=1)
    assert second.shared_len == shared_len
    whole = shared_len // 4
    assert second.pages[:whole] == first.pages[:whole]
    assert not set(second.pages[whole:]) & set(first.pages)
    assert pool.stats().shared_tokens == shared_len
    assert pool.stats().recomputed_tokens == prompt_len + again - shared_len


def test_page_size_one_shares_every_token() -> None:
    pool = make(num_pages=8, page_size=1)
    begin_and_publish(pool, 0, range(5))
    assert begin(pool, 1, [0, 1, 2, 9]).shared_len == 3


def test_nothing_is_shared_before_it_is_published() -> None:
    pool = make()
    begin(pool, 0, range(8))
    assert begin(pool, 1, range(8)).shared_len == 0
    pool.publish(0, range(8), safe_len=7)
    assert begin(pool, 2, range(8)).shared_len == 4


def test_equal_pages_after_different_prefixes_are_different() -> None:
    pool = make()
    begin_and_publish(pool, 0, [1, 1, 1, 1, 5, 5, 5, 5])
    assert begin(pool, 1, [2, 2, 2, 2, 5, 5, 5, 5]).shared_len == 0
    assert begin(pool, 2, [5, 5, 5, 5]).shared_len == 0


def test_grow_and_publish_later() -> None:
    pool = make()
    grant = begin_and_publish(pool, 0, range(6))
    assert pool.grow(0, length=8) == ()
    new = pool.grow(0, length=13)
    assert new is not None and len(new) == 2
    pool.publish(0, range(13), safe_len=12)
    assert begin(pool, 1, range(13)).pages[:3] == (*grant.pages, new[0])


def test_row_begun_twice_finds_its_own_pages() -> None:
    """A retracted request comes back with prompt and output."""
    pool = make(num_pages=4)
    first = begin_and_publish(pool, 0, range(10), reserve=6)
    again = begin(pool, 0, range(13))
    assert again.shared_len == 8 and again.pages[:2] == first.pages[:2]
    assert pool.stats().held_pages == 4 and pool.stats().evictions == 0


def test_pages_live_as_long_as_their_last_row() -> None:
    pool = make(num_pages=3)
    begin_and_publish(pool, 0, range(8))
    begin(pool, 1, range(8))
    pool.release(0)
    pool.check()
    assert (pool.stats().held_pages, pool.stats().cached_pages) == (2, 0)
    assert pool.begin(2, [9] * 8, generation=2, reserve=0) is None
    pool.release(1)
    assert (pool.stats().held_pages, pool.stats().cached_pages) == (0, 2)


def test_equal_pages_of_live_rows_are_not_merged() -> None:
    pool = make()
    first, second = begin(pool, 0, range(8)), begin(pool, 1, range(8))
    for row in (0, 1):
        pool.publish(row, range(8), safe_len=8)
    assert not set(first.pages) & set(second.pages) and pool.stats().held_pages == 4
    assert begin(pool, 2, range(8)).pages == first.pages
    pool.release(1)
    pool.check()
    assert (pool.stats().held_pages, pool.stats().free_pages) == (2, 6)
    assert begin(pool, 3, range(8)).pages == first.pages


def test_a_twin_takes_the_place_of_an_evicted_page() -> None:
    pool = make(num_pages=4)
    begin(pool, 0, range(8))
    begin(pool, 1, range(8))
    for row in (0, 1):
        pool.publish(row, range(8), safe_len=8)
    pool.release(0)
    begin(pool, 2, [9] * 8)  # evicts the published copies
    assert pool.stats().evictions == 2
    pool.release(1)
    pool.check()
    assert begin(pool, 0, range(8)).shared_len == 8


def test_eviction_takes_the_least_recently_used_and_the_ends_first() -> None:
    pool = make(num_pages=4)
    begin_and_publish(pool, 0, range(8))
    begin_and_publish(pool, 1, range(10, 18))
    pool.release(0)
    pool.release(1)
    pool.release(0)  # released already: changes nothing
    begin(pool, 2, [9] * 4)
    assert begin(pool, 3, range(8)).shared_len == 4  # its second page went for row 2, another's for its own
    assert pool.stats().evictions == 2
    pool.release(3)
    assert begin(pool, 0, range(10, 18)).shared_len == 4


def test_out_of_pages_evicts_nothing_and_leaves_the_row_empty() -> None:
    pool = make(num_pages=4)
    begin_and_publish(pool, 0, range(8))
    pool.release(0)
    begin(pool, 1, [9] * 4)
    assert pool.begin(0, range(8), generation=0, reserve=9) is None
    pool.check()
    assert pool.stats() == PoolStats(
        free_pages=1,
        held_pages=1,
        cached_pages=2,
        shared_tokens=0,
        recomputed_tokens=12,
        evictions=0,
        failures=1,
    )
    assert pool.grow(0, length=1) is None and pool.stats().failures == 1
    # Three pages can be had: one is free and two are cached.
    assert pool.grow(1, length=17) is None
    assert len(pool.grow(1, length=16) or ()) == 3
    assert pool.stats().evictions == 2 and pool.stats().failures == 2


def test_begin_does_not_evict_the_pages_it_shares() -> None:
    pool = make(num_pages=3)
    first = begin_and_publish(pool, 0, range(8))
    pool.release(0)
    grant = begin(pool, 1, range(8), reserve=4)
    assert grant.pages[:2] == first.pages and pool.stats().evictions == 0
    assert pool.grow(1, length=13) is None


def test_sweep_releases_dead_rows_and_other_generations() -> None:
    pool = make()
    for row in range(3):
        begin(pool, row, range(10 * row, 10 * row + 4))
    now = {0: 0, 1: 7}  # row 1 serves another request, row 2 none
    assert pool.sweep(lambda row, generation: now.get(row) == generation) == 2
    pool.check()
    assert pool.stats().held_pages == 1


def test_flush_in_the_middle() -> None:
    pool = make()
    begin_and_publish(pool, 0, range(8))
    pool.clear()
    pool.check()
    assert pool.stats().free_pages == 8
    assert pool.grow(0, length=4) is None
    pool.publish(0, range(8), safe_len=8)
    pool.release(0)
    assert pool.sweep(lambda row, generation: False) == 0
    assert begin(pool, 1, range(8)).shared_len == 0


def test_long_runs_are_forgotten_without_deep_recursion() -> None:
    pool = make(num_pages=100_000, page_size=1)
    begin_and_publish(pool, 0, range(100_000))
    pool.clear()
    assert pool.stats().free_pages == 100_000


def test_evicted_prefixes_take_no_memory() -> None:
    pool = make(num_pages=4, page_size=1)
    for start in range(0, 400, 4):
        begin_and_publish(pool, 0, range(start, start + 4))
    assert len(pool._prefixes) == 4


@pytest.mark.parametrize(
    ("field", "sizes"),
    [
        ("num_pages", {"num_pages": 0, "page_size": 1, "num_rows": 1}),
        ("page_size", {"num_pages": 1, "page_size": 0, "num_rows": 1}),
        ("num_rows", {"num_pages": 1, "page_size": 1, "num_rows": -1}),
    ],
)
def test_bad_sizes(field: str, sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=field):
        PagePool(**sizes)


def test_bad_calls() -> None:
    pool = make()
    with pytest.raises(ValueError, match=r"row is 4.*\[0, 4\)"):
        pool.begin(4, [1], generation=0, reserve=0)
    with pytest.raises(ValueError, match="reserve is -1"):
        pool.begin(0, [1], generation=0, reserve=-1)
    begin(pool, 0, range(4))
    with pytest.raises(ValueError, match=r"safe_len is 8.*3 \(tokens\)"):
        pool.publish(0, range(3), safe_len=8)
    with pytest.raises(ValueError, match=r"safe_len is 8.*4 \(room\)"):
        pool.publish(0, range(8), safe_len=8)


def test_a_round_without_new_pages_is_cheap() -> None:
    """16 rows, grow and publish: under 50 us. The best of many rounds, so other load does not count."""
    pool = PagePool(num_pages=64, page_size=64, num_rows=16)
    tokens = list(range(100))
    for row in range(16):
        pool.begin(row, tokens, generation=0, reserve=28)
        pool.publish(row, tokens, safe_len=100)

    def seconds() -> float:
        start = time.perf_counter()
        for row in range(16):
            pool.grow(row, length=120)
            pool.publish(row, tokens, safe_len=105)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(200)) < 50e-6
