"""Layouts: shapes and values by hand, invariants checked, values never read on the host."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from d3d_sglang.layout import PackedLayout, blocks_layout, prefill_layout, sync_layout

CPU = torch.device("cpu")


def sync_example() -> PackedLayout:
    """Two rows, B = 3: 5 cached and 1 committed tokens, and nothing cached and all 3 committed."""
    return sync_layout(prefix_len=torch.tensor([5, 0]), known_len=torch.tensor([1, 3]), block_size=3)


def test_prefill_is_causal_behind_the_prefix() -> None:
    layout = prefill_layout(prefix_len=4, num_tokens=3, device=CPU)
    assert layout.position_ids.tolist() == [[4, 5, 6]]
    assert layout.ctx.tolist() == [[4, 5, 6]]
    assert layout.lo.tolist() == [[4, 5, 6]]
    assert layout.hi.tolist() == [[5, 6, 7]]
    assert layout.prefix_len.tolist() == [4]
    assert layout.num_known == 3


def test_sync_positions_follow_the_committed_tokens() -> None:
    layout = sync_example()
    assert layout.position_ids.tolist() == [[5, 6, 7, 6, 7, 8], [0, 1, 2, 3, 4, 5]]
    assert (layout.num_rows, layout.num_window, layout.num_known) == (2, 6, 3)


def test_sync_block_is_one_segment_behind_its_context() -> None:
    layout = sync_example()
    assert layout.ctx[:, 3:].tolist() == [[6, 6, 6], [3, 3, 3]]
    assert layout.lo[:, 3:].tolist() == [[8, 8, 8], [3, 3, 3]]
    assert layout.hi[:, 3:].tolist() == [[11, 11, 11], [6, 6, 6]]


def test_blocks_follow_their_contexts_and_stand_apart() -> None:
    """B = 3 after 2 known tokens: a block that builds on both of them, and one on the first alone."""
    layout = blocks_layout(
        prefix_len=torch.tensor([5]), num_known=2, context_len=torch.tensor([[7, 6]]), block_size=3
    )
    assert layout.position_ids.tolist() == [[5, 6, 7, 8, 9, 6, 7, 8]]
    assert layout.ctx.tolist() == [[5, 6, 7, 7, 7, 6, 6, 6]]
    assert layout.lo.tolist() == [[5, 6, 7, 7, 7, 10, 10, 10]]
    assert layout.hi.tolist() == [[6, 7, 10, 10, 10, 13, 13, 13]]
    assert layout.num_known == 2


def test_a_block_without_known_tokens_stands_behind_the_prefix() -> None:
    layout = blocks_layout(
        prefix_len=torch.tensor([5, 0]), num_known=0, context_len=torch.tensor([[5], [0]]), block_size=2
    )
    assert layout.position_ids.tolist() == [[5, 6], [0, 1]]
    assert (layout.ctx.tolist(), layout.lo.tolist()) == ([[5, 5], [0, 0]], [[5, 5], [0, 0]])
    assert layout.hi.tolist() == [[7, 7], [2, 2]]


@pytest.mark.parametrize("name", ["position_ids", "ctx", "lo", "hi", "prefix_len"])
def test_wrong_shape_or_dtype_is_refused(name: str) -> None:
    layout = sync_example()
    tensor = getattr(layout, name)
    for wrong in (tensor[:-1], tensor.to(torch.int32), tensor[None], tensor.to("meta")):
        with pytest.raises(AssertionError):
            dataclasses.replace(layout, **{name: wrong})


@pytest.mark.parametrize("num_known", [-1, 7])
def test_num_known_outside_the_window_is_refused(num_known: int) -> None:
    with pytest.raises(AssertionError, match="num_known"):
        dataclasses.replace(sync_example(), num_known=num_known)


def test_builders_read_no_values() -> None:
    # Meta tensors have no values: any host read raises.
    lengths = torch.zeros(2, dtype=torch.int64, device="meta")
    assert sync_layout(prefix_len=lengths, known_len=lengths, block_size=4).ctx.shape == (2, 8)
    blocks = blocks_layout(
        prefix_len=lengths, num_known=4, context_len=lengths[:, None].expand(2, 3), block_size=4
    )
    assert blocks.ctx.shape == (2, 16)
