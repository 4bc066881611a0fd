"""Acceptance against a plain loop, and exactly lossless for a sampled target by enumeration."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d3d_sglang.verify.accept import accept_block

# Sums of at most 27 products of three fp64 probabilities.
EXACT_ATOL = 1e-12


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """draft_tokens, prop_len, target_tokens over a vocabulary of 2, so that long acceptances occur."""
    num_rows, block_size = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    token = st.integers(0, 1)
    row = st.lists(token, min_size=block_size - 1, max_size=block_size - 1)
    target_row = st.lists(token, min_size=block_size, max_size=block_size)
    return (
        draw(st.lists(row, min_size=num_rows, max_size=num_rows)),
        draw(st.lists(st.integers(0, block_size - 1), min_size=num_rows, max_size=num_rows)),
        draw(st.lists(target_row, min_size=num_rows, max_size=num_rows)),
    )


@given(blocks())
def test_equals_the_loop(case: tuple[list[list[int]], list[int], list[list[int]]]) -> None:
    draft, prop_len, target = case
    result = accept_block(torch.tensor(draft), torch.tensor(prop_len), torch.tensor(target))
    for row in range(len(draft)):
        accepted = 0
        while accepted < prop_len[row] and draft[row][accepted] == target[row][accepted]:
            accepted += 1
        assert result.accept_len[row] == accepted
        assert result.bonus[row] == target[row][accepted]
        emitted = [*draft[row][:accepted], target[row][accepted]]
        assert result.out_tokens[row, : accepted + 1].tolist() == emitted
    assert result.accept_len.dtype == result.bonus.dtype == result.out_tokens.dtype == torch.int64


@pytest.mark.parametrize("accepted", range(5))
def test_every_accept_length(accepted: int) -> None:
    draft = torch.tensor([[10, 11, 12, 13]])
    target = torch.tensor([[10, 11, 12, 13, 14]])
    target[0, accepted] = 99
    result = accept_block(draft, torch.tensor([4]), target)
    assert (result.accept_len.item(), result.bonus.item()) == (accepted, 99)


@pytest.mark.parametrize("prop_len", range(5))
def test_nothing_past_prop_len_is_accepted(prop_len: int) -> None:
    result = accept_block(
        torch.tensor([[1, 2, 3, 4]]), torch.tensor([prop_len]), torch.tensor([[1, 2, 3, 4, 5]])
    )
    assert (result.accept_len.item(), result.bonus.item()) == (prop_len, prop_len + 1)


@pytest.mark.parametrize("prop_len", [0, 1, 2])
def test_sampled_target_keeps_its_distribution(prop_len: int) -> None:
    """For every draft, the emitted tokens have exactly the law of the target's own chain (V = 3, B = 3)."""
    vocab_size = 3
    generator = torch.Generator().manual_seed(0)
    table = torch.rand(vocab_size, vocab_size, generator=generator, dtype=torch.float64) + 0.1
    chain = (table / table.sum(dim=1, keepdim=True)).tolist()  # chain[a][b] = p(b | a)
    anchor = 0
    draws = list(itertools.product(range(vocab_size), repeat=3))
    for draft in itertools.product(range(vocab_size), repeat=2):
        result = accept_block(
            torch.tensor([draft] * len(draws)), torch.full((len(draws),), prop_len), torch.tensor(draws)
        )
        law: dict[tuple[int, ...], float] = defaultdict(float)
        for row, draw in enumerate(draws):
            # Column j is drawn after candidates 1..j.
            probability = math.prod(chain[a][b] for a, b in zip((anchor, *draft), draw, strict=True))
            law[tuple(result.out_tokens[row, : int(result.accept_len[row]) + 1].tolist())] += probability
        for emitted, probability in law.items():
            plain = math.prod(chain[a][b] for a, b in zip((anchor, *emitted), emitted, strict=False))
            assert probability == pytest.approx(plain, abs=EXACT_ATOL)


def test_reads_no_values() -> None:
    # Meta tensors have no values: any host read raises.
    tokens = torch.zeros(3, 4, dtype=torch.int64, device="meta")
    result = accept_block(tokens[:, 1:], tokens[:, 0], tokens)
    assert result.accept_len.shape == result.bonus.shape == (3,)
