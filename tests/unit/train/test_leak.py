"""No block sees what its served counterpart could not: what it must not see may change, bit for bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.tiny import MASK_TOKEN_ID, tiny_llama
from tests.unit.train.separate_blocks import sample
from train.model import TrainModel
from train.packing import PackedBatch, pack

BLOCK_SIZE = 4
PROMPT_LEN = 5
RESPONSE_LEN = 10
# Overlapping blocks, the first and the last possible anchor; the other row has fewer anchors and padding.
ANCHORS = [np.array([1, 2, 4, 5, 9]), np.array([1, 3])]


def batch() -> PackedBatch:
    return pack(
        [sample(PROMPT_LEN, RESPONSE_LEN), sample(PROMPT_LEN, 4, seed=1)],
        block_size=BLOCK_SIZE,
        num_anchors=5,
        gamma=7.0,
        mask_token_id=MASK_TOKEN_ID,
        multiple_of=8,
        anchors=ANCHORS,
    )


def hidden(packed: PackedBatch) -> torch.Tensor:
    """What the head reads, fp32 `[N, K, B, E]`: equal bits here are equal bits of the logits."""
    model = TrainModel(tiny_llama(1), mask_token_id=MASK_TOKEN_ID, attention="sdpa")
    with torch.no_grad():
        blocks = model._hidden(packed)[:, packed.layout.num_known :]
    return blocks.unflatten(1, (-1, BLOCK_SIZE))


def changed(packed: PackedBatch, columns: torch.Tensor, *, row: int) -> PackedBatch:
    tokens = packed.token_ids.clone()
    tokens[row, columns] = (tokens[row, columns] + 1) % MASK_TOKEN_ID
    return dataclasses.replace(packed, token_ids=tokens)


BLOCKS = [(row, k) for row, anchors in enumerate(ANCHORS) for k in range(len(anchors))]


@pytest.mark.parametrize(("row", "k"), BLOCKS)
def test_a_block_does_not_see_its_future_or_other_blocks(row: int, k: int) -> None:
    """All columns from the anchor's own copy in the context on, padding and other blocks included."""
    packed = batch()
    first = packed.layout.num_known + k * BLOCK_SIZE
    outside = torch.arange(packed.layout.num_window)
    outside = outside[outside >= PROMPT_LEN + ANCHORS[row][k] - 1]
    outside = outside[(outside < first) | (outside >= first + BLOCK_SIZE)]
    assert torch.equal(hidden(changed(packed, outside, row=row))[row, k], hidden(packed)[row, k])


@pytest.mark.parametrize(("row", "k"), BLOCKS)
def test_a_block_sees_the_last_token_before_its_anchor_and_itself(row: int, k: int) -> None:
    packed = batch()
    before = hidden(packed)[row, k]
    first = packed.layout.num_known + k * BLOCK_SIZE
    for column in (0, PROMPT_LEN + ANCHORS[row][k] - 2, first, first + BLOCK_SIZE - 1):
        after = hidden(changed(packed, torch.tensor([column]), row=row))[row, k]
        assert (after - before).abs().amax(dim=-1).min() > 1e-4, column


def test_rows_do_not_see_each_other() -> None:
    packed = batch()
    everything = torch.arange(packed.layout.num_window)
    assert torch.equal(hidden(changed(packed, everything, row=1))[0], hidden(packed)[0])
    assert torch.equal(hidden(changed(packed, everything, row=0))[1], hidden(packed)[1])


@pytest.mark.parametrize("further", [1, BLOCK_SIZE])
def test_the_check_sees_a_leak(further: int) -> None:
    """A context that reaches past the anchor, as when a mask goes by the index of the block."""
    packed = batch()
    k, first = 2, packed.layout.num_known + 2 * BLOCK_SIZE
    ctx = packed.layout.ctx.clone()
    ctx[0, first : first + BLOCK_SIZE] += further
    leaky = dataclasses.replace(packed, layout=dataclasses.replace(packed.layout, ctx=ctx))
    anchor_copy = torch.tensor([PROMPT_LEN + int(ANCHORS[0][k]) - 1])
    assert not torch.equal(hidden(changed(leaky, anchor_copy, row=0))[0, k], hidden(leaky)[0, k])
