"""The order of an epoch: every example once but for the stated rest, lengths together, resuming."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from train.dataset import WINDOW_BATCHES, batches_by_length, num_batches

LENGTHS = st.lists(st.integers(2, 4000), min_size=1, max_size=300)
ROWS, WORLD = st.integers(1, 8), st.integers(1, 5)
SEED = st.integers(0, 2**31)


def all_ranks(lengths: Any, *, world_size: int, **arguments: Any) -> list[list[np.ndarray]]:
    return [
        batches_by_length(lengths, rank=rank, world_size=world_size, **arguments)
        for rank in range(world_size)
    ]


@given(LENGTHS, ROWS, WORLD, SEED, st.integers(0, 9))
def test_every_example_once_but_for_the_rest(
    lengths: list[int], rows: int, world_size: int, seed: int, epoch: int
) -> None:
    ranks = all_ranks(lengths, rows_per_batch=rows, world_size=world_size, seed=seed, epoch=epoch)
    count = len(lengths) // (rows * world_size)
    assert [len(batches) for batches in ranks] == [count] * world_size
    assert num_batches(len(lengths), rows_per_batch=rows, world_size=world_size) == count
    assert all(batch.shape == (rows,) for batches in ranks for batch in batches)
    taken = Counter(int(i) for batches in ranks for batch in batches for i in batch)
    assert set(taken.values()) <= {1}
    assert len(taken) == count * rows * world_size and set(taken) <= set(range(len(lengths)))


@given(LENGTHS, ROWS, WORLD, SEED, st.integers(0, 9), st.data())
def test_resuming_equals_going_on(
    lengths: list[int], rows: int, world_size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    settings = {"rows_per_batch": rows, "world_size": world_size, "rank": rank, "seed": seed, "epoch": epoch}
    straight = batches_by_length(lengths, **settings)
    start = data.draw(st.integers(0, len(straight)))
    resumed = batches_by_length(np.array(lengths), **settings, start=start)
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in straight[start:]]


@given(st.integers(64, 300), ROWS, SEED)
def test_epochs_and_seeds_differ(count: int, rows: int, seed: int) -> None:
    assume(count // rows >= 8)

    def order(**changes: int) -> list[int]:
        settings = {"rows_per_batch": rows, "rank": 0, "world_size": 1, "seed": seed, "epoch": 0} | changes
        return np.concatenate(batches_by_length(np.arange(count) + 2, **settings)).tolist()

    assert order() == order()
    assert len({tuple(order()), tuple(order(epoch=1)), tuple(order(seed=seed + 1))}) == 3


def test_what_is_left_out_changes_with_the_epoch() -> None:
    """Of 103 examples in batches of 10, 3 are left out; after 200 epochs each was, about 6 times."""
    left_out: Counter[int] = Counter()
    for epoch in range(200):
        batches = batches_by_length(
            np.full(103, 5), rows_per_batch=10, rank=0, world_size=1, seed=0, epoch=epoch
        )
        left_out.update(set(range(103)) - set(np.concatenate(batches).tolist()))
    assert sum(left_out.values()) == 600 and len(left_out) >= 98


def padded_share(lengths: np.ndarray, batches: list[np.ndarray]) -> float:
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
    return 1 - sum(int(lengths[batch].sum()) for batch in batches) / padded


def test_little_padding_and_equal_work() -> None:
    """On lengths like those of real answers: far less padding than at random, ranks nearly level."""
    lengths = np.minimum(2048, np.random.default_rng(0).lognormal(5.7, 0.8, 20_000).astype(int) + 20)
    settings = {"rows_per_batch": 4, "seed": 1, "epoch": 0}
    ranks = all_ranks(lengths, world_size=4, **settings)
    at_random = list(np.random.default_rng(1).permutation(20_000).reshape(-1, 4))
    assert padded_share(lengths, at_random) > 0.35
    assert all(padded_share(lengths, batches) < 0.06 for batches in ranks)
    longest = np.array([[lengths[batch].max() for batch in batches] for batches in ranks])
    assert longest.max(axis=0).sum() < 1.05 * longest.mean(axis=0).sum()


def test_batches_of_all_lengths_come_all_the_time() -> None:
    """Sorted windows must not become a curriculum: the mean length of any stretch is near that of all."""
    lengths = np.random.default_rng(0).integers(2, 2000, 8 * WINDOW_BATCHES * 4)
    batches = batches_by_length(lengths, rows_per_batch=4, rank=0, world_size=1, seed=0, epoch=0)
    means = np.array([lengths[batch].mean() for batch in batches]).reshape(-1, WINDOW_BATCHES // 2)
    # a stretch of 32 batches out of a window of 64: deviation of its mean is about 577 / sqrt(32) = 102
    assert np.abs(means.mean(axis=1) - lengths.mean()).max() < 4 * 102


def test_order_within_a_window_is_not_by_length() -> None:
    lengths = np.arange(2, 2 + 4 * WINDOW_BATCHES)
    batches = batches_by_length(lengths, rows_per_batch=4, rank=0, world_size=1, seed=0, epoch=0)
    firsts = [int(batch.min()) for batch in batches]
    assert sorted(firsts) == list(range(0, 4 * WINDOW_BATCHES, 4)), "batches are not neighbours in length"
    rises = sum(a < b for a, b in pairwise(firsts))
    assert WINDOW_BATCHES * 0.25 < rises < WINDOW_BATCHES * 0.75


def test_fewer_examples_than_a_step() -> None:
    assert batches_by_length([5, 5, 5], rows_per_batch=2, rank=0, world_size=2, seed=0, epoch=0) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows_per_batch": 0}, "rows_per_batch is 0"),
        ({"world_size": 0}, "world_size is 0"),
        ({"rank": 2}, "rank is 2, allowed are 0 to 1"),
        ({"rank": -1}, "rank is -1"),
        ({"epoch": -1}, "epoch is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"start": 3}, "start is 3, allowed are 0 to 2"),
    ],
)
def test_arguments_out_of_range(changes: dict[str, int], message: str) -> None:
    settings = {"rows_per_batch": 2, "rank": 0, "world_size": 2, "seed": 0, "epoch": 0} | changes
    with pytest.raises(ValueError, match=message):
        batches_by_length([5] * 8, **settings)
