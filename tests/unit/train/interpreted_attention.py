"""The Triton kernels of training attention on a CPU. `test_attention_triton.py` runs this file, not pytest.

Triton interprets kernels only if TRITON_INTERPRET is set when it is first imported, and in a whole test
session something imports it earlier. So these tests have a process of their own.

fp32 and fp16: the interpreter multiplies the raw bits of bf16, whose tests are in `test_attention_gpu.py`.
"""

from __future__ import annotations

import math
import os
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.train.attention_cases import (
    Heads,
    assert_matches,
    random_packing,
    training_packing,
)
from tests.unit.train.attention_model import assert_packed_equals_blocks
from train.attention.triton_forward import TritonPlan
from train.attention.triton_tiles import Tile, Tiles

assert os.environ["TRITON_INTERPRET"] == "1"


class SlowWrapper:
    """FlashInfer's paged prefill, from its documentation: one request after the other."""

    def __init__(self, _workspace: torch.Tensor, kv_layout: str, backend: str) -> None:
        assert (kv_layout, backend) == ("NHD", "fa2")

    def plan(self, *args: Any, **options: Any) -> None:
        self.queries, self.page_offsets, self.pages, last_page_len = (x.tolist() for x in args[:4])
        assert last_page_len == [args[7]] * (len(self.queries) - 1)
        self.mask, self.scaling = options["custom_mask"], options["sm_scale"]

    def run(
        self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert return_lse
        group = query.shape[1] // cache[0].shape[2]
        outs, lses, start = [], [], 0
        for queries, listed in zip(pairwise(self.queries), pairwise(self.page_offsets), strict=True):
            q = query[slice(*queries)].float().transpose(0, 1)  # [H, queries, D]
            k, v = (
                x[self.pages[slice(*listed)]]
                .flatten(0, 1)
                .float()
                .repeat_interleave(group, dim=1)
                .transpose(0, 1)
                for x in cache
            )  # [H, keys, D]
            mask = self.mask[start : start + q.shape[1] * k.shape[1]].view(q.shape[1], k.shape[1])
            start += mask.numel()
            scores = (q @ k.transpose(1, 2) * self.scaling).masked_fill(~mask, -torch.inf)
            outs.append((scores.softmax(2) @ v).transpose(0, 1))
            lses.append(scores.logsumexp(2).transpose(0, 1) / math.log(2))
        assert start == self.mask.numel()
        return torch.cat(outs).to(query.dtype), torch.cat(lses)


# Before the import below. The package itself takes longer to import than all of these tests to run.
sys.modules["flashinfer"] = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=SlowWrapper)  # type: ignore[assignment]

from train.attention.flashinfer import FlashInferPlan  # noqa: E402

# fp32 sums in another order, over at most 300 keys. fp16 rounds probabilities to 5e-4 before each product.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
# Queries and keys of different size, in both directions, so that no kernel can mistake one for the other.
SMALL_TILES = Tiles(forward=Tile(32, 16, 4, 1), dq=Tile(16, 32, 4, 1), dkdv=Tile(16, 32, 4, 1))


@pytest.mark.parametrize(
    ("seed", "dtype"), [(0, torch.float32), (1, torch.float32), (2, torch.float16), (3, torch.float16)]
)
def test_triton_gradients(seed: int, dtype: torch.dtype) -> None:
    packing = random_packing(seed, ordered=seed % 2 == 0)
    num_heads, num_kv_heads = [(2, 2), (3, 1), (4, 2)][seed % 3]
    heads = Heads(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=16, dtype=dtype)
    plan = TritonPlan.make(packing.layout(), head_dim=16, dtype=dtype, tiles=SMALL_TILES)
    assert_matches(plan, packing, heads, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_triton_gradients_with_the_tiles_of_training(head_dim: int) -> None:
    """Several full tiles of every kernel, which smaller rows do not have."""
    packing = training_packing(num_rows=1, context_len=200, num_blocks=6)
    heads = Heads(num_heads=2, num_kv_heads=1, head_dim=head_dim, dtype=torch.float16)
    plan = TritonPlan.make(packing.layout(), head_dim=head_dim, dtype=heads.dtype)
    assert plan.backward.num_full.sum() > 0
    assert (plan.ranges[..., 0] > 0).any() and (plan.backward.kv_ranges[..., 0] > 0).any()
    assert_matches(plan, packing, heads, tolerance=TOLERANCE[torch.float16])


@pytest.mark.parametrize("seed", range(3))
def test_flashinfer_requests_and_backward(seed: int) -> None:
    """Page tables, masks and the base of the log-sum-exp, with a stand-in for FlashInfer's kernel alone."""
    packing = training_packing(
        num_rows=2, context_len=64 + 7 * seed, num_blocks=9, block_size=[16, 8, 5][seed]
    )
    heads = Heads(num_heads=3, num_kv_heads=1, head_dim=64, dtype=torch.float16)
    plan = FlashInferPlan.make(
        packing.layout(), num_heads=3, num_kv_heads=1, head_dim=64, dtype=heads.dtype, scaling=64**-0.5
    )
    assert_matches(plan, packing, heads, tolerance=TOLERANCE[torch.float16])
    with pytest.raises(ValueError, match="scaling"):
        plan.attend(*torch.zeros(3, 2, 3, packing.num_tokens, 64), scaling=1.0)


def test_model_equals_its_blocks_run_alone() -> None:
    """With checkpointing, where the forward runs twice; without it is `test_triton_gradients` again."""
    assert_packed_equals_blocks("triton", checkpointing=True)
