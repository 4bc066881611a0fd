"""Thousands of sampled rounds by the chi-square test, and the chi-square test itself.

Legend: N rows, B block size, V vocabulary, K support size; p target, q draft distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scipy.stats import kstest

from d3d_sglang import coins
from d3d_sglang.spec_types import DraftProposal
from d3d_sglang.verify.sampling import filtered_probs, reject_sample
from tests.unit.chi_square import Emitted, p_value, p_values

VOCAB_SIZE, BLOCK_SIZE, SUPPORT_SIZE = 16, 5, 6
NUM_ROWS, NUM_ROUNDS = 1000, 50
MIN_TOKENS = 20_000
MIN_P_VALUE = 0.01  # the rounds are always the same ones
FAR, NEAR = "far", "near"


@dataclass(frozen=True)
class Faults:
    """What can go wrong with q or the coins. Nothing, unless said otherwise."""

    claim: Callable[[torch.Tensor], torch.Tensor] = lambda q: q  # on [N, B-1, K]
    accept_stream: int = coins.ACCEPT
    final_stream: int = coins.RESIDUAL


def draw_candidates(q: torch.Tensor, tosses: torch.Tensor) -> torch.Tensor:
    """Index into the support `[N, B-1]` of each candidate."""
    return (q.cumsum(dim=-1) <= tosses[:, :, None] * q.sum(dim=-1, keepdim=True)).sum(dim=-1)


def run_rounds(faults: Faults) -> tuple[list[Emitted], dict[int, Any]]:
    """Rounds of a target that looks at the last token; half of the rows have a q near the first p.

    The other half's q is unrelated. As a block drafter, both look at the anchor only.
    """
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator) * 1.5
    p = filtered_probs(
        target[None],
        temperatures=torch.full((1, 1), 0.8),
        top_ks=None,
        top_ps=torch.tensor([0.97]),
        min_ps=None,
    )[0]
    noise = torch.randn(2, BLOCK_SIZE - 1, VOCAB_SIZE, VOCAB_SIZE, generator=generator)
    drafter = torch.stack([noise[0] * 1.5, target / 0.8 + noise[1] * 0.3])  # [2, B-1, V, V], by anchor
    row = torch.arange(NUM_ROWS)
    anchor, position = row % VOCAB_SIZE, torch.full((NUM_ROWS,), 100)
    column = torch.arange(BLOCK_SIZE)
    emitted = []
    for _ in range(NUM_ROUNDS):
        logits, support = drafter[row % 2, :, anchor].topk(SUPPORT_SIZE)
        q = torch.softmax(logits, dim=-1)  # [N, B-1, K]
        places = position[:, None] + 1 + column[:-1]
        choice = draw_candidates(q, coins.uniform(row, places, stream=coins.DRAFT))
        tokens = support.gather(2, choice[:, :, None]).squeeze(2)
        prop_len = torch.where(row % 5 == 0, BLOCK_SIZE - 2, BLOCK_SIZE - 1)
        before = torch.cat([anchor[:, None], tokens], dim=1)  # [N, B]
        result = reject_sample(
            DraftProposal(tokens, prop_len, support, faults.claim(q)),
            p[before],
            accept_coins=coins.uniform(row, places, stream=faults.accept_stream),
            final_coins=coins.uniform(row, places[:, 0], stream=faults.final_stream),
        )
        new = column <= result.accept_len[:, None]
        for n, context, token in zip(
            row[:, None].expand_as(new)[new].tolist(),
            before[new].tolist(),
            result.out_tokens[new].tolist(),
            strict=True,
        ):
            emitted.append(Emitted(context, token, group=(FAR, NEAR)[n % 2]))
        anchor, position = result.bonus, position + result.accept_len + 1
    return emitted, dict(enumerate(p.numpy()))


def test_rounds_emit_what_the_target_would() -> None:
    emitted, target = run_rounds(Faults())
    by_group = p_values(emitted, target)
    for group in (FAR, NEAR):
        assert sum(one.group == group for one in emitted) >= MIN_TOKENS
        assert by_group[group] > MIN_P_VALUE
    # The two drafters are what they are called: otherwise one of the groups would test nothing.
    per_round = {
        group: sum(one.group == group for one in emitted) / (NUM_ROUNDS * NUM_ROWS / 2)
        for group in (FAR, NEAR)
    }
    assert per_round[FAR] < 1.3 and per_round[NEAR] > 1.9


@pytest.mark.parametrize(
    "faults",
    [
        Faults(claim=lambda q: torch.full_like(q, 1 / SUPPORT_SIZE)),
        Faults(claim=lambda q: q.roll(1, dims=1)),  # the q of another column
        Faults(claim=lambda q: torch.softmax(q.log() / 1.5, dim=-1)),  # of another temperature
        Faults(accept_stream=coins.DRAFT),
        Faults(final_stream=coins.ACCEPT),
    ],
    ids=["uniform", "other-column", "other-temperature", "accepts-by-draft-coins", "ends-by-accept-coins"],
)
def test_the_chi_square_sees_faults(faults: Faults) -> None:
    emitted, target = run_rounds(faults)
    assert p_values(emitted, target)[FAR] < 1e-6


def test_chi_square_p_values_are_uniform_under_the_target() -> None:
    """Contexts that leave much choice and contexts that leave hardly any, rare tokens included."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.5, 2.0, 6.0])[torch.arange(2000) % 3, None]
    probs = torch.softmax(torch.randn(2000, 30, generator=generator) * scale, dim=-1)
    draws = torch.multinomial(probs, 400, replacement=True, generator=generator).T.numpy()
    sample = [p_value(tokens, probs.numpy()) for tokens in draws]
    assert kstest(sample, "uniform").pvalue > MIN_P_VALUE


def test_chi_square_knows_impossible_tokens() -> None:
    target = {"a": torch.tensor([0.5, 0.5, 0.0]).numpy()}
    fine = [Emitted("a", n % 2) for n in range(100)]
    assert p_values(fine, target)[None] > 0.9
    assert p_values([*fine, Emitted("a", 2)], target)[None] == 0


def test_reads_no_values() -> None:
    # Meta tensors have no values: any host read raises.
    tokens = torch.zeros(3, 4, dtype=torch.int64, device="meta")
    probs = torch.zeros(3, 5, 9, device="meta")
    wide = torch.zeros(3, 4, 2, device="meta")
    proposal = DraftProposal(tokens, tokens[:, 0], wide.long(), wide)
    result = reject_sample(proposal, probs, accept_coins=wide[:, :, 0], final_coins=wide[:, 0, 0])
    assert result.out_tokens.shape == (3, 5)
    assert result.accept_len.shape == result.bonus.shape == (3,)
