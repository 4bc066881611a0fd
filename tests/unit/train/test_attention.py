"""Training attention on the CPU: tiles, block lists, SDPA, FlexAttention's forward, registration, refusals.

The Triton kernels are tested in `test_attention_triton.py`, everything again in bf16 on a GPU in
`test_attention_gpu.py`.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaModel

from tests.unit.train.attention_cases import (
    Heads,
    Packing,
    assert_matches,
    differentiate,
    random_inputs,
    random_packing,
    reference,
    training_packing,
)
from tests.unit.train.attention_model import assert_packed_equals_blocks
from train.attention import ATTENTION_NAMES, AttentionName, implementation, make_plan, register
from train.attention.flex import FlexPlan
from train.attention.sdpa import SdpaPlan
from train.attention.tiles import QueryTiles, index_lists

# fp32 and float64 sums over at most 200 keys in another order.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def tile_masks(packing: Packing, *, size: int, kv_size: int) -> dict[tuple[int, int, int], torch.Tensor]:
    """The part of the mask in every tile, by (row, tile of queries, tile of keys)."""
    mask = packing.mask()
    starts = range(0, packing.num_tokens, size), range(0, packing.num_tokens, kv_size)
    return {
        (n, q // size, k // kv_size): mask[n, q : q + size, k : k + kv_size]
        for n, q, k in product(range(len(packing.rows)), *starts)
    }


@given(
    seed=st.integers(0, 10_000),
    ordered=st.booleans(),
    size=st.sampled_from([8, 16, 32, 128]),
    kv_size=st.sampled_from([8, 16, 32, 128]),
)
def test_skipped_tiles_are_empty_and_full_ones_full(
    seed: int, ordered: bool, size: int, kv_size: int
) -> None:
    packing = random_packing(seed, ordered=ordered)
    tiles = QueryTiles.of(packing.layout(), size)
    visible, full, ranges = tiles.visible(kv_size), tiles.full(kv_size), tiles.ranges(kv_size)
    for (n, t, j), part in tile_masks(packing, size=size, kv_size=kv_size).items():
        a, b, c, d = ranges[n, t].tolist()
        assert 0 <= a <= b <= c <= d
        if part.any():
            assert visible[n, t, j] and (j < b or c <= j < d)
        if full[n, t, j]:
            assert part.shape == (size, kv_size) and part.all()
        if j < a:  # a last tile of queries may be short, a tile of keys may not
            assert part.shape[1] == kv_size and part.all()
        assert full[n, t, j] <= visible[n, t, j]


def test_sorted_rows_visit_little_more_than_they_see() -> None:
    """The figure the design rests on, for rows of the usual shape."""
    packing = training_packing(num_rows=1, context_len=512, num_blocks=64)
    layout = packing.layout()
    pairs = torch.where(layout.ctx > 0, layout.ctx + layout.hi - layout.lo, 1).sum()
    assert pairs == packing.mask().sum()
    visited = QueryTiles.of(layout, 64).visible(64).sum() * 64 * 64
    assert visited < 1.3 * pairs  # 1.06 at twice the length, where tiles are smaller against the row
    full = QueryTiles.of(layout, 64).full(64).sum() * 64 * 64
    assert full > 0.6 * pairs


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_index_lists(chosen: list[list[bool]]) -> None:
    transposed = torch.tensor(chosen).T.contiguous().T
    count, index = index_lists(transposed)
    assert index.is_contiguous() and count.dtype == index.dtype == torch.int32
    for row, num, indices in zip(chosen, count.tolist(), index.tolist(), strict=True):
        assert indices[:num] == [i for i, value in enumerate(row) if value]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("seed", range(6))
def test_sdpa_gradients(seed: int, dtype: torch.dtype) -> None:
    packing = random_packing(seed, ordered=seed % 2 == 0)
    heads = Heads(num_heads=[2, 3, 6][seed % 3], num_kv_heads=[2, 1, 2][seed % 3], head_dim=8, dtype=dtype)
    assert_matches(SdpaPlan.make(packing.layout()), packing, heads, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("seed", range(4))
def test_flex_forward(seed: int) -> None:
    """The eager one, which evaluates the rule on every pair and ignores the tiles."""
    packing = random_packing(seed)
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    inputs = random_inputs(packing, heads)
    out = FlexPlan.make(packing.layout()).attend(*inputs[:3], scaling=0.25)
    expected = reference(packing, inputs, scaling=0.25).out
    assert (out - expected).abs().max() < TOLERANCE[torch.float32] * expected.abs().max()


def test_flex_block_mask_is_the_mask() -> None:
    """Its tiles, which the compiled kernels trust."""
    packing = training_packing(num_rows=3, context_len=300, num_blocks=20)
    block_mask = FlexPlan.make(packing.layout()).block_mask
    listed = {}
    for kind, count, index in (
        ("partial", block_mask.kv_num_blocks, block_mask.kv_indices),
        ("full", block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        for n, t in product(range(count.shape[0]), range(count.shape[2])):
            listed |= {(n, t, j): kind for j in index[n, 0, t, : count[n, 0, t]].tolist()}
    for tile, part in tile_masks(packing, size=128, kv_size=128).items():
        if part.any():
            assert listed[tile] == "full" if part.all() and part.numel() == 128 * 128 else "partial"
        if listed.get(tile) == "full":
            assert part.all()
    assert "full" in listed.values() and len(listed) < 0.8 * len(tile_masks(packing, size=128, kv_size=128))


def test_flex_does_not_train_on_a_cpu() -> None:
    packing = random_packing(0)
    heads = Heads(num_heads=2, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    plan = FlexPlan.make(packing.layout())
    with pytest.raises(NotImplementedError, match="CPU"):
        differentiate(lambda q, k, v: plan.attend(q, k, v, scaling=1.0), random_inputs(packing, heads))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_model_equals_its_blocks_run_alone(checkpointing: bool) -> None:
    assert_packed_equals_blocks("sdpa", checkpointing=checkpointing)


@pytest.mark.parametrize("name", ATTENTION_NAMES)
def test_transformers_calls_every_implementation(name: AttentionName) -> None:
    """With the plan, with a tensor's tokens before its heads in memory, and with no mask of its own."""
    register()
    register()
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_implementation=implementation(name),
    )
    plan = RecordingPlan(name)
    model = LlamaModel(config)
    layout = random_packing(0).layout()
    token_ids = torch.zeros(layout.ctx.shape, dtype=torch.int64)
    model(input_ids=token_ids, position_ids=layout.position_ids, attention_plan=plan, use_cache=False)
    (query, key, value), scaling = plan.seen
    assert query.shape == (*layout.ctx.shape[:1], 2, layout.num_window, 16) and scaling == 0.25
    assert key.shape == value.shape == (*layout.ctx.shape[:1], 1, layout.num_window, 16)
    # The kernels copy what is not.
    assert all(x.transpose(1, 2).is_contiguous() for x in (query, key, value))
    with pytest.raises(AssertionError, match="a plan for other"):
        model(
            input_ids=token_ids,
            position_ids=layout.position_ids,
            attention_plan=RecordingPlan("other"),
            use_cache=False,
        )


class RecordingPlan:
    """Keeps what it was called with."""

    def __init__(self, name: str) -> None:
        self.name = name

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float
    ) -> torch.Tensor:
        self.seen = (query, key, value), scaling
        return query.transpose(1, 2)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("flash", {}, "'flash' is unknown"),
        ("sdpa", {"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ("triton", {"head_dim": 80}, "head_dim 80"),
        ("triton", {"dtype": torch.float64}, "float64"),
        ("flashinfer", {}, "needs a CUDA device, not cpu"),
    ],
)
def test_refusals(name: AttentionName, changes: dict[str, object], message: str) -> None:
    options = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16} | changes
    with pytest.raises(ValueError, match=message):
        make_plan(name, random_packing(0).layout(), **options)  # type: ignore[arg-type]
