"""Passes cover every anchor once within their bound; drafts are those of blocks run alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import MASK_TOKEN_ID
from tests.unit.train.separate_blocks import block_logits, exact_llama, sample
from train.answer_drafts import MAX_ANCHORS_PER_ROW, draft_answers, plan_passes
from train.model import TrainModel

lengths_of_examples = st.lists(st.tuples(st.integers(1, 300), st.integers(2, 500)), min_size=1, max_size=6)


@given(lengths_of_examples, st.integers(2, 16), st.integers(832 + 16, 20_000))
def test_every_anchor_is_drafted_once(
    lengths: list[tuple[int, int]], block_size: int, batch_tokens: int
) -> None:
    drafted = []
    for ranges in plan_passes(lengths, block_size=block_size, batch_tokens=batch_tokens):
        context = max(anchors.prompt_len + anchors.last + 1 for anchors in ranges)
        blocks = max(anchors.num_anchors for anchors in ranges)
        assert len(ranges) * (context + blocks * block_size) <= batch_tokens
        assert blocks <= MAX_ANCHORS_PER_ROW
        drafted += [(a.example, s) for a in ranges for s in range(a.first, a.last + 1)]
    assert sorted(drafted) == [(i, s) for i, (_, response) in enumerate(lengths) for s in range(1, response)]


def test_short_answers_share_a_pass() -> None:
    """A context of 64 columns and 9 blocks of 4 each: 10 rows fit into 1,000."""
    passes = plan_passes([(20, 10)] * 25, block_size=4, batch_tokens=1000)
    assert [len(ranges) for ranges in passes] == [10, 10, 5]


def test_too_long_an_example_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_tokens is 140, it must be at least 144"):
        plan_passes([(3, 4), (100, 20)], block_size=16, batch_tokens=140)


@pytest.mark.parametrize("batch_tokens", [68, 200, 4000])
def test_drafts_are_those_of_blocks_run_alone(batch_tokens: int) -> None:
    """From one anchor a pass to everything in one."""
    examples = [sample(5, 9), sample(3, 2, seed=1), sample(8, 14, seed=2)]
    model = TrainModel(exact_llama(1), mask_token_id=MASK_TOKEN_ID, attention="sdpa")
    found = dict(draft_answers(model, examples, block_size=4, top=3, batch_tokens=batch_tokens))
    assert sorted(found) == [0, 1, 2]
    slow = exact_llama(1)
    for number, example in enumerate(examples):
        assert found[number].answer is example.response_ids
        anchors = range(1, len(example.response_ids))
        logits = torch.stack([block_logits(slow, example, s, block_size=4)[1:] for s in anchors])
        assert np.array_equal(found[number].ranked, logits.topk(3).indices.numpy())
