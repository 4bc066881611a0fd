"""Training attention on a GPU: all implementations in the types they train in, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.unit.train.attention_cases import (
    Heads,
    Packing,
    assert_matches,
    differentiate,
    random_inputs,
    random_packing,
    training_packing,
)
from tests.unit.train.attention_model import assert_packed_equals_blocks
from train.attention import ATTENTION_NAMES, AttentionName, make_plan

pytestmark = pytest.mark.gpu

# Inputs are the same rounded ones; outputs, probabilities and their gradients are rounded once each (bf16
# 4e-3, fp16 5e-4 of a value), and the largest element is 2 to 5 times the typical one.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}
HEADS = [(9, 3, 64), (4, 2, 128)]  # SmolLM2-135M's; a part of Qwen3-1.7B's


def check(name: AttentionName, packing: Packing, heads: Heads) -> None:
    plan = make_plan(
        name,
        packing.layout("cuda"),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        dtype=heads.dtype,
    )
    assert_matches(plan, packing, heads, tolerance=TOLERANCE[heads.dtype], device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("name", ATTENTION_NAMES)
def test_gradients(name: AttentionName, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Rows as in training, several tiles of every kind."""
    check(name, training_packing(num_rows=2, context_len=320, num_blocks=24), Heads(*shape, dtype))


@pytest.mark.parametrize("name", ["sdpa", "triton"])
def test_fp32_gradients(name: AttentionName) -> None:
    packing = training_packing(num_rows=2, context_len=128, num_blocks=8)
    check(name, packing, Heads(4, 2, 64, torch.float32))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ATTENTION_NAMES)
def test_gradients_of_odd_rows(name: AttentionName, seed: int) -> None:
    """Dead blocks, padding, unordered and repeated anchors, sizes that no tile divides."""
    check(name, random_packing(seed, ordered=seed % 2 == 0), Heads(6, 2, 64, torch.bfloat16))


@pytest.mark.parametrize("name", ["flashinfer", "triton"])
def test_gradients_repeat(name: AttentionName) -> None:
    """Bit by bit: no sum depends on the order in which programs finish."""
    packing = training_packing(num_rows=2, context_len=256, num_blocks=16)
    heads = Heads(9, 3, 64, torch.bfloat16)
    inputs = random_inputs(packing, heads, device="cuda")
    plan = make_plan(
        name, packing.layout("cuda"), num_heads=9, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16
    )
    first, second = (
        differentiate(lambda q, k, v: plan.attend(q, k, v, scaling=0.125), inputs) for _ in range(2)
    )
    assert all(torch.equal(x, getattr(second, name)) for name, x in vars(first).items())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["flex", "triton"])
def test_model_equals_its_blocks_run_alone(name: AttentionName, checkpointing: bool) -> None:
    """fp32, which FlashInfer's kernels do not take."""
    assert_packed_equals_blocks(name, checkpointing=checkpointing, device="cuda")
