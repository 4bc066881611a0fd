"""Acceptance of sampled candidates: a slow loop, the exact law of what is emitted, properties.

The law is integrated over the coins exactly: with p and q on a coarse lattice every outcome is constant on
cells of a regular grid of coins, so one coin in the middle of each cell stands for all of it.

Legend: N rows, B block size, V vocabulary, K support size; p target, q draft distribution.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d3d_sglang import coins
from d3d_sglang.spec_types import DraftProposal, VerifyResult
from d3d_sglang.verify.accept import accept_block
from d3d_sglang.verify.sampling import filtered_probs, reject_sample

# Sums of at most 500,000 fp64 weights, each at most 1.
EXACT_ATOL = 1e-10

# Acceptance against a loop.


def slow_reject(
    tokens: list[int],
    prop_len: int,
    q: list[dict[int, Fraction]],
    p: list[list[Fraction]],
    accept_coins: list[Fraction],
    final_coin: Fraction,
) -> list[int]:
    """The emitted tokens of one row, in exact fractions."""
    emitted = []
    weights = p[prop_len]
    for j in range(prop_len):
        x = tokens[j]
        if accept_coins[j] * q[j][x] >= p[j][x]:
            weights = [max(mass - q[j].get(v, Fraction(0)), Fraction(0)) for v, mass in enumerate(p[j])]
            if sum(weights) == 0:
                weights = p[j]
            break
        emitted.append(x)
    rest = final_coin * sum(weights)
    for v, weight in enumerate(weights):
        if rest < weight:
            return [*emitted, v]
        rest -= weight
    raise AssertionError("a coin below 1 always lands on a token")


@st.composite
def lattice_distribution(draw: st.DrawFn, size: int, steps: int = 16) -> list[Fraction]:
    """Multiples of 1/`steps`, zeros included; exact in fp32."""
    cuts = sorted(draw(st.lists(st.integers(0, steps), min_size=size - 1, max_size=size - 1)))
    return [Fraction(b - a, steps) for a, b in zip([0, *cuts], [*cuts, steps], strict=True)]


@dataclass(frozen=True)
class Row:
    tokens: list[int]
    prop_len: int
    support_ids: list[list[int]]
    support_probs: list[list[Fraction]]
    p: list[list[Fraction]]
    accept_coins: list[Fraction]
    final_coin: Fraction


@st.composite
def lattice_row(draw: st.DrawFn, block_size: int, vocab_size: int, support_size: int) -> Row:
    """Everything exact in fp32; candidates have q above 0, and fillers are anything."""
    prop_len = draw(st.integers(0, block_size - 1))
    coin = st.integers(0, 255).map(lambda x: Fraction(x, 256))
    tokens, ids, probs = [], [], []
    for j in range(block_size - 1):
        if j >= prop_len:
            tokens.append(draw(st.sampled_from([-1, 0, 10**9])))
            ids.append([-7] * support_size)
            probs.append([Fraction(3)] * support_size)
            continue
        ids.append(draw(st.permutations(range(vocab_size)))[:support_size])
        probs.append(draw(lattice_distribution(support_size)))
        tokens.append(draw(st.sampled_from([i for i, x in zip(ids[-1], probs[-1], strict=True) if x > 0])))
    return Row(
        tokens=tokens,
        prop_len=prop_len,
        support_ids=ids,
        support_probs=probs,
        p=[draw(lattice_distribution(vocab_size)) for _ in range(block_size)],
        accept_coins=[draw(coin) for _ in tokens],
        final_coin=draw(coin),
    )


def fp32(values: Any) -> torch.Tensor:
    """Nested lists of fractions as a tensor."""
    as_floats = [fp32(x).tolist() if isinstance(x, list) else float(x) for x in values]
    return torch.tensor(as_floats, dtype=torch.float32)


def reject_rows(rows: list[Row]) -> VerifyResult:
    proposal = DraftProposal(
        torch.tensor([row.tokens for row in rows]),
        torch.tensor([row.prop_len for row in rows]),
        torch.tensor([row.support_ids for row in rows]),
        fp32([row.support_probs for row in rows]),
    )
    accept_coins, final_coins = (
        fp32([row.accept_coins for row in rows]),
        fp32([row.final_coin for row in rows]),
    )
    p = fp32([row.p for row in rows])
    return reject_sample(proposal, p, accept_coins=accept_coins, final_coins=final_coins)


def assert_well_formed(result: VerifyResult, prop_len: torch.Tensor, vocab_size: int) -> None:
    assert result.out_tokens.dtype == result.accept_len.dtype == result.bonus.dtype == torch.int64
    assert (result.accept_len <= prop_len).all() and (result.accept_len >= 0).all()
    assert torch.equal(result.out_tokens.gather(1, result.accept_len[:, None])[:, 0], result.bonus)
    assert ((result.out_tokens >= 0) & (result.out_tokens < vocab_size)).all()


@given(st.data())
def test_equals_the_loop(data: st.DataObject) -> None:
    block_size, vocab_size = data.draw(st.integers(2, 5)), data.draw(st.integers(2, 5))
    support_size = data.draw(st.integers(1, vocab_size))
    rows = data.draw(st.lists(lattice_row(block_size, vocab_size, support_size), min_size=1, max_size=4))
    result = reject_rows(rows)
    assert_well_formed(result, torch.tensor([row.prop_len for row in rows]), vocab_size)
    for n, row in enumerate(rows):
        q = [dict(zip(i, x, strict=True)) for i, x in zip(row.support_ids, row.support_probs, strict=True)]
        expected = slow_reject(row.tokens, row.prop_len, q, row.p, row.accept_coins, row.final_coin)
        emitted = result.out_tokens[n, : int(result.accept_len[n]) + 1].tolist()
        assert emitted == expected
        assert all(row.p[j][x] > 0 for j, x in enumerate(emitted))


# Acceptance by its law.


def whole_support(tokens: torch.Tensor, q: torch.Tensor, *, prop_len: torch.Tensor) -> DraftProposal:
    """A proposal with q `[N, B-1, V]` over the whole vocabulary."""
    return DraftProposal(tokens, prop_len, torch.arange(q.shape[-1]).expand_as(q), q)


def certain(tokens: torch.Tensor, *, prop_len: torch.Tensor) -> DraftProposal:
    """A proposal whose q are point masses, in a support of one token."""
    return DraftProposal(tokens, prop_len, tokens[:, :, None], torch.ones(*tokens.shape, 1))


# With these q and p in eighths, p / q is a multiple of 1/8: so many cells for a coin that accepts.
Q_VALUES = ((1.0, 0.0, 0.0), (0.5, 0.5, 0.0), (0.5, 0.25, 0.25))
ACCEPT_CELLS = 8
# The final draw is from multiples of 1/8 that add up to m/8: its edges are multiples of 1/m.
FINAL_CELLS = math.lcm(*range(1, 9))

Law = dict[tuple[int, ...], float]


@dataclass(frozen=True)
class Chain:
    """A target and a drafter that look at the last token only; V = 3, B = 3, the anchor is 0."""

    p: torch.Tensor  # [V, V], row: last token
    q: torch.Tensor  # [B-1, V, V], by column of the block and last token


def lattice_chain(seed: int) -> Chain:
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, 9, (3, 2), generator=generator).sort(dim=1).values
    edges = torch.cat([torch.zeros(3, 1), cuts, torch.full((3, 1), 8)], dim=1)
    orders = torch.rand(2, 3, 3, generator=generator).argsort(dim=2)
    kinds = torch.randint(0, 3, (2, 3), generator=generator)
    return Chain(p=torch.diff(edges, dim=1) / 8, q=torch.tensor(Q_VALUES)[kinds].gather(2, orders))


def law_of(result: VerifyResult, mass: torch.Tensor) -> Law:
    """Total mass `[N]` of every emitted sequence (V = 3, B = 3)."""
    emitted = torch.where(torch.arange(3) <= result.accept_len[:, None], result.out_tokens, 3)  # [N, 3]
    totals = torch.bincount(emitted @ torch.tensor([16, 4, 1]), mass.double(), minlength=64).view(4, 4, 4)
    return {
        tuple(x for x in index if x < 3): totals[index].item()
        for index in itertools.product(range(4), repeat=3)
        if totals[index] > 0
    }


def emitted_law(chain: Chain, prop_len: int, *, claimed_q: torch.Tensor) -> Law:
    """Exact law of what one round emits, summed over drafts and cells of coins.

    Args:
        claimed_q: what acceptance is told the candidates were drawn from, of the shape of `chain.q`.
    """
    column = torch.arange(2)
    grid = [torch.arange(n) for n in (3, 3, ACCEPT_CELLS, ACCEPT_CELLS, FINAL_CELLS)]
    cells = torch.cartesian_prod(*grid)
    tokens, cells = cells[:, :2], cells[:, 2:]
    before = torch.nn.functional.pad(tokens[:, :1], (1, 0))  # [N, 2], the anchor is 0
    drawn = chain.q[column, before].gather(2, tokens[:, :, None]).squeeze(2)  # [N, 2]
    possible = (drawn > 0).all(dim=1)
    tokens, cells, before, drawn = (x[possible] for x in (tokens, cells, before, drawn))
    q = claimed_q[column, before]  # [N, 2, V]
    proposal = whole_support(tokens, q, prop_len=torch.full((len(tokens),), prop_len))
    result = reject_sample(
        proposal,
        chain.p[torch.cat([before, tokens[:, 1:]], dim=1)],
        accept_coins=(cells[:, :2] + 0.5) / ACCEPT_CELLS,
        final_coins=(cells[:, 2] + 0.5) / FINAL_CELLS,
    )
    assert_well_formed(result, proposal.prop_len, 3)
    return law_of(result, drawn.double().prod(dim=1) / (ACCEPT_CELLS**2 * FINAL_CELLS))


def law_error(law: Law, chain: Chain) -> float:
    """After every start that a round went on from, the next token has to have the target's distribution.

    Whether a round goes on may depend on the tokens so far, so the law of whole rounds is not compared.
    """
    after: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [0.0] * 3)
    for emitted, mass in law.items():
        for j, token in enumerate(emitted):
            after[emitted[:j]][token] += mass
    assert sum(after[()]) == pytest.approx(1, abs=EXACT_ATOL)
    return max(
        abs(mass - p * sum(masses))
        for start, masses in after.items()
        for mass, p in zip(masses, chain.p[start[-1] if start else 0].tolist(), strict=True)
    )


@pytest.mark.parametrize("prop_len", [0, 1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_emitted_law_is_the_targets(seed: int, prop_len: int) -> None:
    chain = lattice_chain(seed)
    law = emitted_law(chain, prop_len, claimed_q=chain.q)
    assert law_error(law, chain) < EXACT_ATOL
    assert max(len(emitted) for emitted in law) <= prop_len + 1


def test_emitted_law_is_not_the_targets_with_a_wrong_q() -> None:
    chain = lattice_chain(0)
    wrong_q = chain.q.roll(1, dims=2)
    assert law_error(emitted_law(chain, 2, claimed_q=wrong_q), chain) > 0.01


@pytest.mark.parametrize("prop_len", [0, 1, 2])
@pytest.mark.parametrize("draft", itertools.product(range(3), repeat=2))
def test_point_masses_have_the_law_of_accept_block(draft: tuple[int, int], prop_len: int) -> None:
    """Two ways to accept a draft that is certain: by coins, and by comparing with draws of the target."""
    chain = lattice_chain(1)
    point_mass = torch.nn.functional.one_hot(torch.tensor(draft), 3).float()[:, None].expand(2, 3, 3)
    law = emitted_law(replace(chain, q=point_mass), prop_len, claimed_q=point_mass)
    draws = torch.cartesian_prod(*[torch.arange(3)] * 3)  # [N, B], all there are
    mass = chain.p[[0, *draft]].gather(1, draws.T).double().prod(dim=0)  # [N]
    tokens = torch.tensor(draft).expand(len(draws), 2)
    expected = law_of(accept_block(tokens, torch.full((len(draws),), prop_len), draws), mass)
    assert law == pytest.approx(expected, abs=EXACT_ATOL)


# Properties.


def random_probs(*shape: int, seed: int) -> torch.Tensor:
    return torch.softmax(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2, dim=-1)


def random_coins(num_rows: int, width: int) -> dict[str, torch.Tensor]:
    seeds, positions = torch.arange(num_rows), torch.arange(width).expand(num_rows, -1)
    return {
        "accept_coins": coins.uniform(seeds, positions, stream=coins.ACCEPT),
        "final_coins": coins.uniform(seeds, positions[:, 0], stream=coins.RESIDUAL),
    }


def test_equal_p_and_q_always_accept() -> None:
    num_rows, width, vocab_size = 2000, 7, 11
    p = random_probs(num_rows, width + 1, vocab_size, seed=0)
    tokens = torch.multinomial(p[:, :-1].flatten(0, 1), 1).view(num_rows, width)
    prop_len = torch.arange(num_rows) % (width + 1)
    proposal = whole_support(tokens, p[:, :-1], prop_len=prop_len)
    tosses = random_coins(num_rows, width)
    tosses["accept_coins"][::2] = 1 - 2.0**-24  # the largest coin there is
    assert torch.equal(reject_sample(proposal, p, **tosses).accept_len, prop_len)


def test_a_refusal_without_residual_draws_from_p() -> None:
    """q above p everywhere, as rounding can make it."""
    p = torch.tensor([[[0.0, 0.5, 0.5, 0.0], [0.25, 0.25, 0.25, 0.25]]]).expand(4, -1, -1)
    proposal = DraftProposal(
        torch.full((4, 1), 1),
        torch.ones(4, dtype=torch.int64),
        torch.tensor([1, 2]).expand(4, 1, 2),
        torch.full((4, 1, 2), 0.5 + 2**-20),
    )
    final = torch.tensor([0.0, 0.49, 0.51, 1 - 2.0**-24])
    result = reject_sample(proposal, p, accept_coins=torch.full((4, 1), 1 - 2.0**-24), final_coins=final)
    assert result.accept_len.tolist() == [0] * 4
    assert result.bonus.tolist() == [1, 1, 2, 2]


def test_a_support_without_the_tokens_p_likes() -> None:
    """p gives q's support nothing: every candidate is refused, and the bonus comes from p untouched."""
    p = torch.tensor([[[0.0, 0.0, 0.25, 0.75]] * 2]).expand(4, -1, -1)
    proposal = DraftProposal(
        torch.tensor([[0], [1], [0], [1]]),
        torch.ones(4, dtype=torch.int64),
        torch.tensor([0, 1]).expand(4, 1, 2),
        torch.full((4, 1, 2), 0.5),
    )
    final = torch.tensor([0.0, 0.24, 0.26, 0.99])
    result = reject_sample(proposal, p, accept_coins=torch.zeros(4, 1), final_coins=final)
    assert result.accept_len.tolist() == [0] * 4
    assert result.bonus.tolist() == [2, 2, 3, 3]


@pytest.mark.parametrize("coin", [0.0, 0.5, 1 - 2.0**-24])
def test_tokens_the_target_rules_out_are_never_drawn(coin: float) -> None:
    """Large vocabulary with zeros at both ends and in between."""
    generator = torch.Generator().manual_seed(0)
    num_rows, vocab_size = 64, 20_000
    p = torch.rand(num_rows, 2, vocab_size, generator=generator)
    p = torch.where(torch.rand(p.shape, generator=generator) < 0.9, 0.0, p)
    p[:, :, :100] = p[:, :, -100:] = 0
    p = p / p.sum(dim=-1, keepdim=True)
    proposal = certain(torch.zeros(num_rows, 1, dtype=torch.int64), prop_len=torch.arange(num_rows) % 2)
    tosses = {"accept_coins": torch.zeros(num_rows, 1), "final_coins": torch.full((num_rows,), coin)}
    result = reject_sample(proposal, p, **tosses)
    assert (p[:, 0].gather(1, result.bonus[:, None]) > 0).all()


def test_rare_tokens_keep_their_share() -> None:
    """Half of the mass on tokens of 1e-5 each after a token of 1/2: drawing does not shift them."""
    num_rows, vocab_size = 64, 50_001
    p = torch.full((1, 2, vocab_size), 1e-5)
    p[:, :, 0] = 0.5
    final = (torch.arange(num_rows) + 0.5) / num_rows
    no_tokens = torch.zeros(num_rows, 1, dtype=torch.int64)
    proposal = certain(no_tokens, prop_len=no_tokens[:, 0])
    tosses = {"accept_coins": torch.zeros(num_rows, 1), "final_coins": final}
    drawn = reject_sample(proposal, p.expand(num_rows, -1, -1), **tosses).bonus
    mass = 0.5 + 50_000 * float(p[0, 0, 1])
    expected = ((final.double() * mass - 0.5) / float(p[0, 0, 1])).floor().clamp(min=-1).long() + 1
    assert torch.equal(drawn, expected)


def test_greedy_rows_accept_as_argmax_does() -> None:
    """In a batch with sampled rows, and whether or not the drafter is certain."""
    num_rows, width, vocab_size = 500, 4, 3
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, width + 1, vocab_size, generator=generator)
    greedy = torch.arange(num_rows) % 3 < 2
    p = filtered_probs(
        logits,
        temperatures=torch.ones(num_rows, 1),
        top_ks=torch.where(greedy, 1, vocab_size),
        top_ps=None,
        min_ps=None,
    )
    tokens = torch.randint(0, vocab_size, (num_rows, width), generator=generator)
    prop_len = torch.randint(0, width + 1, (num_rows,), generator=generator)
    q = random_probs(num_rows, width, vocab_size, seed=1)
    point_mass = torch.nn.functional.one_hot(tokens, vocab_size).float()
    q = torch.where((torch.arange(num_rows) % 3 == 0)[:, None, None], point_mass, q)
    proposal = whole_support(tokens, q, prop_len=prop_len)
    result = reject_sample(proposal, p, **random_coins(num_rows, width))
    expected = accept_block(tokens, prop_len, logits.argmax(dim=-1))
    assert torch.equal(result.accept_len[greedy], expected.accept_len[greedy])
    assert torch.equal(result.bonus[greedy], expected.bonus[greedy])
    assert set(expected.accept_len[greedy].tolist()) == set(range(width + 1))


def test_a_row_does_not_notice_its_batch() -> None:
    num_rows, width, vocab_size = 6, 4, 9
    p = random_probs(num_rows, width + 1, vocab_size, seed=0)
    q = random_probs(num_rows, width, vocab_size, seed=2)
    tosses = random_coins(num_rows, width)
    prop_len = torch.full((num_rows,), width)

    def run(part: slice) -> VerifyResult:
        proposal = whole_support(q[part].argmax(dim=-1), q[part], prop_len=prop_len[part])
        return reject_sample(proposal, p[part], **{name: coin[part] for name, coin in tosses.items()})

    together = run(slice(None))
    for n in range(num_rows):
        assert torch.equal(run(slice(n, n + 1)).out_tokens[0], together.out_tokens[n])
