"""Packing: layout and targets by hand and against loops over tokens, for random shapes; refusals."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d3d_sglang.masks import dense_mask
from tests.tiny import MASK_TOKEN_ID as MASK
from tests.unit.train.separate_blocks import example_of, sample
from train.dataset import Example
from train.packing import PackedBatch, pack

# Weights are computed in float64 and stored in fp32.
WEIGHT_RTOL = 1e-6


def packed(examples: list[Example], *, seed: int = 0, **changes: Any) -> PackedBatch:
    arguments: dict[str, Any] = {
        "block_size": 3,
        "num_anchors": 2,
        "gamma": 7.0,
        "mask_token_id": MASK,
        "multiple_of": 4,
        "generator": np.random.default_rng(seed),
    }
    return pack(examples, **arguments | changes)


def by_hand() -> PackedBatch:
    """L = 2, T = 4, anchors 1 and 3; L = 1, T = 2 and its one anchor. B = 3, K = 2, S = 8, W = 14."""
    first = example_of([10, 11], [21, 22, 23, 24])
    second = example_of([12], [25, 26])
    return packed([first, second], anchors=[np.array([1, 3]), np.array([1])])


def test_tokens_by_hand() -> None:
    assert by_hand().token_ids.tolist() == [
        [10, 11, 21, 22, 23, 24, MASK, MASK, 21, MASK, MASK, 23, MASK, MASK],
        [12, 25, 26, *[MASK] * 5, 25, MASK, MASK, MASK, MASK, MASK],
    ]


def test_layout_by_hand() -> None:
    layout = by_hand().layout
    assert (layout.num_known, layout.prefix_len.tolist()) == (8, [0, 0])
    assert layout.position_ids.tolist() == [
        [0, 1, 2, 3, 4, 5, 0, 0, 2, 3, 4, 4, 5, 6],
        [0, 1, 2, 0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0],
    ]
    assert layout.ctx.tolist() == [
        [0, 1, 2, 3, 4, 5, 0, 0, 2, 2, 2, 4, 4, 4],
        [0, 1, 2, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0],
    ]
    assert layout.lo[:, :8].tolist() == [list(range(8))] * 2
    assert layout.hi[:, :8].tolist() == [list(range(1, 9))] * 2
    assert layout.lo[:, 8:].tolist() == [[8, 8, 8, 11, 11, 11], [8, 8, 8, 11, 12, 13]]
    assert layout.hi[:, 8:].tolist() == [[11, 11, 11, 14, 14, 14], [11, 11, 11, 12, 13, 14]]


def test_targets_by_hand() -> None:
    """Block offsets 1 and 2 predict their own positions, context the next one; r_4 ends the second block."""
    batch = by_hand()
    assert batch.diff.index.tolist() == [9, 10, 12, 14 + 9]
    assert batch.diff.labels.tolist() == [22, 23, 24, 26]
    decay = math.exp(-1 / 7)
    expected = [x / (2 + decay) for x in (1, decay, 1)]
    torch.testing.assert_close(batch.diff.weights, torch.tensor([*expected, 1.0]), rtol=WEIGHT_RTOL, atol=0)
    assert batch.ar.index.tolist() == [1, 2, 3, 4, 14, 15]
    assert batch.ar.labels.tolist() == [21, 22, 23, 24, 25, 26]
    assert batch.ar.weights.tolist() == [0.25] * 4 + [0.5] * 2


def test_work_by_hand() -> None:
    batch = by_hand()
    assert (batch.num_rows, batch.num_blocks, batch.block_size) == (2, 2, 3)
    assert batch.num_tokens == 6 + 3 + 3 * 3
    assert batch.num_pairs == (1 + 2 + 3 + 4 + 5 + 6) + 3 * (2 + 3) + 3 * (4 + 3) + (1 + 2 + 3) + 3 * (1 + 3)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Example], PackedBatch]:
    """Rows of any lengths, T < B and T = 2 among them, and more blocks than a row has anchors."""
    lengths = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(2, 12)), min_size=1, max_size=3))
    examples = [sample(prompt, response, seed=i) for i, (prompt, response) in enumerate(lengths)]
    batch = packed(
        examples,
        seed=draw(st.integers(0, 99)),
        block_size=draw(st.integers(2, 6)),
        num_anchors=draw(st.integers(1, 8)),
        gamma=draw(st.sampled_from([0.5, 7.0, math.inf])),
        multiple_of=draw(st.sampled_from([1, 4, 16])),
    )
    return examples, batch


@given(batches())
@settings(max_examples=60)
def test_every_token_sees_what_it_should(drawn: tuple[list[Example], PackedBatch]) -> None:
    """The mask, built token by token from what a column is."""
    examples, batch = drawn
    num_context, block_size = batch.layout.num_known, batch.block_size
    seen = dense_mask(batch.layout, max_prefix=0)
    for row, example in enumerate(examples):
        prompt_len, response_len = len(example.prompt_ids), len(example.response_ids)
        length = prompt_len + response_len
        num_anchors = min(batch.num_blocks, response_len - 1)
        anchor_at = batch.layout.position_ids[row, num_context::block_size].tolist()[:num_anchors]
        assert anchor_at == sorted(set(anchor_at))
        assert all(prompt_len <= at < length - 1 for at in anchor_at)
        expected = torch.eye(batch.layout.num_window, dtype=torch.bool)
        positions = [*range(length), *[0] * (num_context - length)]
        for query in range(length):
            expected[query, : query + 1] = True
        for k in range(batch.num_blocks):
            block = range(num_context + k * block_size, num_context + (k + 1) * block_size)
            for offset, query in enumerate(block):
                if k < num_anchors:
                    expected[query, : anchor_at[k]] = True
                    expected[query, block.start : block.stop] = True
                positions.append(anchor_at[k] + offset if k < num_anchors else 0)
        assert torch.equal(seen[row], expected)
        assert batch.layout.position_ids[row].tolist() == positions
    assert batch.num_pairs == sum(int(seen[row].sum()) for row in range(batch.num_rows)) - _num_padding(batch)


@given(batches())
@settings(max_examples=60)
def test_every_target_is_its_position_in_the_answer(drawn: tuple[list[Example], PackedBatch]) -> None:
    examples, batch = drawn
    num_context, num_window = batch.layout.num_known, batch.layout.num_window
    diff = {int(i): int(label) for i, label in zip(batch.diff.index, batch.diff.labels, strict=True)}
    ar = {int(i): int(label) for i, label in zip(batch.ar.index, batch.ar.labels, strict=True)}
    for row, example in enumerate(examples):
        tokens = [*example.prompt_ids.tolist(), *example.response_ids.tolist()]
        for column in range(num_window):
            at, position = row * num_window + column, int(batch.layout.position_ids[row, column])
            if column < num_context:
                predicts = len(example.prompt_ids) - 1 <= column < len(tokens) - 1
                assert ar.pop(at, None) == (tokens[column + 1] if predicts else None)
                continue
            masked = (column - num_context) % batch.block_size > 0
            live = int(batch.layout.ctx[row, column]) > 0
            predicts = masked and live and position < len(tokens)
            assert diff.pop(at, None) == (tokens[position] if predicts else None)
    assert not diff and not ar


@given(batches())
@settings(max_examples=60)
def test_weights_of_every_example_sum_to_one(drawn: tuple[list[Example], PackedBatch]) -> None:
    _, batch = drawn
    for targets in (batch.diff, batch.ar):
        sums = torch.zeros(batch.num_rows, dtype=torch.float64)
        sums.index_add_(0, targets.index // batch.layout.num_window, targets.weights.double())
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=WEIGHT_RTOL, atol=0)


def test_anchors_are_uniform_and_follow_the_generator() -> None:
    example = sample(2, 6)
    assert torch.equal(packed([example]).token_ids, packed([example]).token_ids)
    generator, counts = np.random.default_rng(0), np.zeros(6)
    for _ in range(1000):
        batch = packed([example], generator=generator)
        counts[batch.layout.position_ids[0, 8::3] - 2] += 1
    assert counts[5] == 0 and counts.sum() == 2000
    # 2 of 5 anchors: each 400 times, standard deviation 15.5.
    assert (abs(counts[:5] - 400) < 5 * 15.5).all()


def test_short_answers_use_every_anchor() -> None:
    batch = packed([sample(3, 4)], num_anchors=9)
    assert batch.layout.ctx[0, 8::3].tolist() == [3, 4, 5, *[0] * 6]


def test_moves_as_a_whole_and_between_processes() -> None:
    batch = by_hand()
    moved = batch.to("meta")
    for holder in (moved, moved.layout, moved.diff, moved.ar):
        tensors = [value for value in vars(holder).values() if isinstance(value, torch.Tensor)]
        assert tensors and all(tensor.device.type == "meta" for tensor in tensors)
    assert (moved.num_tokens, moved.num_blocks) == (batch.num_tokens, batch.num_blocks)
    again = pickle.loads(pickle.dumps(batch))
    assert torch.equal(again.layout.ctx, batch.layout.ctx) and torch.equal(
        again.diff.weights, batch.diff.weights
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size is 1"),
        ({"num_anchors": 0}, "num_anchors is 0"),
        ({"gamma": 0.0}, r"gamma is 0\.0"),
        ({"gamma": math.nan}, "gamma is nan"),
        ({"multiple_of": 0}, "multiple_of is 0"),
        ({"generator": None}, "generator is None"),
        ({"anchors": []}, "anchors has 0 rows"),
        ({"anchors": [np.array([], int)]}, "ascending, from 1 to 3"),
        ({"anchors": [np.array([0])]}, "ascending, from 1 to 3"),
        ({"anchors": [np.array([4])]}, "ascending, from 1 to 3"),
        ({"anchors": [np.array([2, 2])]}, "ascending, from 1 to 3"),
        ({"anchors": [np.array([1, 2, 3])]}, "1 to 2 of them"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed([sample(2, 4)], **changes)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (sample(0, 4), "has 0 prompt tokens"),
        (sample(2, 1), "1 response tokens"),
        (example_of([1], [2, MASK, 3]), f"holds the mask token {MASK}"),
    ],
)
def test_wrong_examples_are_refused(example: Example, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed([sample(2, 4), example])


def test_no_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="examples is empty"):
        packed([])


def _num_padding(batch: PackedBatch) -> int:
    return batch.token_ids.numel() - batch.num_tokens
