"""Coins: uniform, unrelated over seeds, positions and streams, and the same whatever batch they are in."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from d3d_sglang import coins
from d3d_sglang.coins import uniform

STREAMS = {"accept": coins.ACCEPT, "residual": coins.RESIDUAL, "draft": coins.DRAFT}
INT64 = st.integers(-(2**63), 2**63 - 1)
# Tests are of fixed coins, so a p-value is what it is; about 60 of them are looked at. A real defect gives
# less than 1e-20 (see the last two tests).
MIN_P_VALUE = 1e-4
# Correlations of 2^16 pairs have a standard deviation of 1/256; about 60 of them are looked at.
MAX_CORRELATION = 4.5 / 256


def slow_uniform(seed: int, position: int, stream: int) -> float:
    """The definition in unsigned Python integers."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    state = mix((seed ^ stream) % 2**64)
    return (mix((state + position * 0x9E3779B97F4A7C15) % 2**64) >> 40) / 2**24


def uniformity(sample: torch.Tensor) -> float:
    """p-value of coins falling evenly into 256 cells."""
    cells = (sample.flatten().double() * 256).long()
    return float(stats.chisquare(torch.bincount(cells, minlength=256).numpy()).pvalue)


def pair_p_value(one: torch.Tensor, other: torch.Tensor) -> float:
    """p-value of pairs falling evenly into 32 x 32 cells."""
    cells = (one.flatten().double() * 32).long() * 32 + (other.flatten().double() * 32).long()
    return float(stats.chisquare(torch.bincount(cells, minlength=1024).numpy()).pvalue)


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]).double())[0, 1])


def assert_unrelated(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.numel() >= 2**16
    assert abs(correlation(one, other)) < MAX_CORRELATION
    assert pair_p_value(one, other) > MIN_P_VALUE


def grid(num_seeds: int, num_positions: int, *, stream: int, seed_step: int = 1) -> torch.Tensor:
    seeds = torch.arange(num_seeds) * seed_step
    return uniform(seeds, torch.arange(num_positions).expand(num_seeds, -1), stream=stream)


@given(st.lists(st.tuples(INT64, INT64), min_size=1, max_size=5), st.sampled_from(sorted(STREAMS.values())))
def test_equals_the_definition(pairs: list[tuple[int, int]], stream: int) -> None:
    seeds, positions = torch.tensor(pairs).unbind(1)
    got = uniform(seeds, positions, stream=stream)
    assert got.dtype == torch.float32
    assert got.tolist() == [slow_uniform(seed, position, stream) for seed, position in pairs]


def test_mixing_is_splitmix64() -> None:
    # First outputs of SplitMix64 seeded with 1234567, as published with its reference code.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    steps = torch.arange(1, 4) * coins._STEP
    assert [bits % 2**64 for bits in coins._mix(1234567 + steps).tolist()] == published


@given(st.lists(INT64, min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 100_000), st.data())
def test_a_row_does_not_notice_its_batch(
    seeds: list[int], width: int, start: int, data: st.DataObject
) -> None:
    positions = torch.arange(start, start + len(seeds) * width).view(len(seeds), width)
    together = uniform(torch.tensor(seeds), positions, stream=coins.ACCEPT)
    assert together.shape == (len(seeds), width)
    row = data.draw(st.integers(0, len(seeds) - 1))
    alone = uniform(torch.tensor([seeds[row]]), positions[row : row + 1], stream=coins.ACCEPT)
    assert torch.equal(alone[0], together[row])
    column = data.draw(st.integers(0, width - 1))
    assert torch.equal(
        uniform(torch.tensor(seeds), positions[:, column], stream=coins.ACCEPT), together[:, column]
    )


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize(
    ("num_seeds", "num_positions", "seed_step"),
    # Many positions of one seed, many seeds at one position, both; seeds that differ in high bits only, and
    # by the counter's own increment.
    [(1, 2**18, 1), (2**18, 1, 1), (512, 512, 1), (4096, 64, 2**40), (4096, 64, coins._STEP)],
)
def test_uniform(stream: int, num_seeds: int, num_positions: int, seed_step: int) -> None:
    sample = grid(num_seeds, num_positions, stream=stream, seed_step=seed_step)
    assert sample.min() >= 0 and sample.max() < 1
    assert uniformity(sample) > MIN_P_VALUE
    ks = stats.kstest(sample.flatten().double().numpy(), "uniform").pvalue
    assert ks > MIN_P_VALUE


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("seed_step", [1, 2**32, coins._STEP])
def test_neighbours_are_unrelated(stream: int, seed_step: int) -> None:
    sample = grid(257, 272, stream=stream, seed_step=seed_step)
    assert_unrelated(sample[:-1], sample[1:])  # seeds
    for distance in (1, 2, 16):
        assert_unrelated(sample[:, :-distance], sample[:, distance:])  # positions
    assert_unrelated(sample[1:, :-1], sample[:-1, 1:])  # the next position of the seed before


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(STREAMS, 2)))
def test_streams_are_unrelated(one: str, other: str) -> None:
    assert_unrelated(grid(256, 256, stream=STREAMS[one]), grid(256, 256, stream=STREAMS[other]))


def test_every_input_bit_reaches_every_output_bit() -> None:
    """Flipping one bit of seed or position flips each of the 24 bits of a coin half of the time."""
    num = 4096
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**62), 2**62, (num,), generator=generator)
    positions = torch.randint(0, 2**17, (num,), generator=generator)
    shifts = torch.arange(24)

    def bits(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        whole = (uniform(seeds, positions, stream=coins.DRAFT) * 2**24).long()
        return (whole[:, None] >> shifts) & 1

    before = bits(seeds, positions)
    # 82 x 24 shares, each with a standard deviation of 1 / (2 sqrt(4096)) = 1/128.
    bound = 5 / 128
    for bit in range(64):
        flip = -(2**63) if bit == 63 else 1 << bit
        share = (bits(seeds ^ flip, positions) != before).double().mean(dim=0)
        assert (share - 0.5).abs().max() < bound
        if bit < 18:
            share = (bits(seeds, positions ^ flip) != before).double().mean(dim=0)
            assert (share - 0.5).abs().max() < bound


def test_the_uniformity_check_can_fail() -> None:
    sample = grid(512, 512, stream=coins.ACCEPT)
    assert uniformity(sample**1.1) < 1e-20


def test_the_independence_check_can_fail() -> None:
    sample = grid(512, 512, stream=coins.ACCEPT)
    shifted = (sample + 0.5 + grid(512, 512, stream=coins.DRAFT) * 0.9).remainder(1)  # hardly correlated
    assert pair_p_value(sample, shifted) < 1e-20
    assert math.isclose(correlation(sample, sample), 1.0)


def test_reads_no_values() -> None:
    # Meta tensors have no values: any host read raises.
    seeds = torch.zeros(3, dtype=torch.int64, device="meta")
    positions = torch.zeros(3, 4, dtype=torch.int64, device="meta")
    assert uniform(seeds, positions, stream=coins.DRAFT).shape == (3, 4)
    assert uniform(seeds, positions[:, 0], stream=coins.DRAFT).shape == (3,)
