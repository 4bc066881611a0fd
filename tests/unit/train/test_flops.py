"""Counted operations, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import LlamaConfig, Qwen3Config

from tests.tiny import MASK_TOKEN_ID
from tests.unit.train.separate_blocks import sample
from train.flops import forward_flops, training_flops
from train.packing import pack

TINY = LlamaConfig(
    vocab_size=100,
    hidden_size=8,
    intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def test_one_token_by_hand() -> None:
    """Head size 2: q and o are 8 x 8, k and v 8 x 4, the MLP three times 8 x 20; the head is 8 x 100."""
    layer = 2 * (8 * 8 + 8 * 8 + 8 * 4 + 8 * 4 + 3 * 8 * 20)
    attention = 2 * (4 * 2 + 4 * 2)  # one score and one weighted value for each of 4 heads of size 2
    assert forward_flops(TINY, num_tokens=1, num_pairs=0, num_predictions=0) == 3 * layer
    assert forward_flops(TINY, num_tokens=0, num_pairs=1, num_predictions=0) == 3 * attention
    assert forward_flops(TINY, num_tokens=0, num_pairs=0, num_predictions=1) == 2 * 8 * 100
    assert forward_flops(TINY, num_tokens=5, num_pairs=7, num_predictions=2) == (
        5 * 3 * layer + 7 * 3 * attention + 2 * 2 * 8 * 100
    )


def test_a_head_size_of_its_own_counts() -> None:
    config = Qwen3Config(
        vocab_size=10,
        hidden_size=4,
        intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=6,
    )
    linear = 2 * (2 * 4 * 12 + 2 * 4 * 6 + 3 * 4 * 6)
    assert forward_flops(config, num_tokens=1, num_pairs=0, num_predictions=0) == linear


def test_a_linear_layer_is_twice_the_parameters_of_the_large_model() -> None:
    """SmolLM2-135M: 106.2 million linear weights in its layers, 28.3 million in the head."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    linear = forward_flops(config, num_tokens=1, num_pairs=0, num_predictions=0)
    assert linear / 2 == pytest.approx(106.2e6, rel=1e-3)
    head = forward_flops(config, num_tokens=0, num_pairs=0, num_predictions=1)
    assert head / 2 == pytest.approx(28.3e6, rel=1e-3)


def test_a_batch_counts_no_padding() -> None:
    """L = 2, T = 3, B = 3, anchors 1 and 2: the second block has one token left to predict."""
    settings = {"block_size": 3, "gamma": 7.0, "mask_token_id": MASK_TOKEN_ID}
    batch = pack([sample(2, 3)], num_anchors=9, multiple_of=64, anchors=[np.array([1, 2])], **settings)
    pairs = (1 + 2 + 3 + 4 + 5) + 3 * (2 + 3) + 3 * (3 + 3)
    expected = forward_flops(TINY, num_tokens=5 + 6, num_pairs=pairs, num_predictions=2 + 1 + 3)
    assert training_flops(TINY, batch) == 3 * expected
