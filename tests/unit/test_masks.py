"""The dense mask against a plain loop that says in words what every kind of token sees."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from d3d_sglang.layout import PackedLayout, blocks_layout, prefill_layout, sync_layout
from d3d_sglang.masks import dense_mask

CPU = torch.device("cpu")


@st.composite
def sync_cases(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    """prefix_len and known_len of up to 4 rows, block size, prefix columns (at least the longest prefix)."""
    block_size = draw(st.integers(2, 6))
    num_rows = draw(st.integers(1, 4))
    prefix_len = draw(st.lists(st.integers(0, 7), min_size=num_rows, max_size=num_rows))
    known_len = draw(st.lists(st.integers(0, block_size), min_size=num_rows, max_size=num_rows))
    return prefix_len, known_len, block_size, max(prefix_len) + draw(st.integers(0, 3))


def sync_mask(
    prefix_len: list[int], known_len: list[int], *, block_size: int, max_prefix: int
) -> torch.Tensor:
    layout = sync_layout(
        prefix_len=torch.tensor(prefix_len), known_len=torch.tensor(known_len), block_size=block_size
    )
    return dense_mask(layout, max_prefix=max_prefix)


@st.composite
def packed_cases(draw: st.DrawFn) -> tuple[PackedLayout, list[list[int]], int]:
    """Rows of known tokens and blocks with any contexts, how many known tokens each block builds on, B."""
    num_rows, num_blocks = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    block_size, num_known = draw(st.integers(2, 4)), draw(st.integers(0, 4))
    prefix_len = draw(st.lists(st.integers(0, 5), min_size=num_rows, max_size=num_rows))
    offsets = [
        draw(st.lists(st.integers(0, num_known), min_size=num_blocks, max_size=num_blocks))
        for _ in range(num_rows)
    ]
    prefix = torch.tensor(prefix_len)
    layout = blocks_layout(
        prefix_len=prefix,
        num_known=num_known,
        context_len=prefix[:, None] + torch.tensor(offsets, dtype=torch.int64).view(num_rows, num_blocks),
        block_size=block_size,
    )
    return layout, offsets, block_size


@given(case=packed_cases(), spare=st.integers(0, 3))
def test_packed_mask_equals_the_loop(case: tuple[PackedLayout, list[list[int]], int], spare: int) -> None:
    """Blocks see their own context and themselves; known tokens see no block; blocks see no other."""
    layout, offsets, block_size = case
    num_known = layout.num_known
    max_prefix = int(layout.prefix_len.max()) + spare
    mask = dense_mask(layout, max_prefix=max_prefix)

    def block_of(token: int) -> int | None:
        return None if token < num_known else (token - num_known) // block_size

    for row, prefix in enumerate(layout.prefix_len.tolist()):
        for query in range(layout.num_window):
            own = block_of(query)
            expected = [column < prefix for column in range(max_prefix)]
            for key in range(layout.num_window):
                if block_of(key) is not None:
                    expected.append(block_of(key) == own)
                else:
                    expected.append(key <= query if own is None else key < offsets[row][own])
            assert mask[row, query].tolist() == expected


def sees_in_words(
    query: int, column: int, *, prefix: int, known: int, block_size: int, max_prefix: int
) -> bool:
    """Whether window token `query` may look at mask column `column`, from what the tokens are."""
    if column < max_prefix:
        return column < prefix  # every token sees every cached token, and only those exist
    key = column - max_prefix
    query_in_block, key_in_block = query >= block_size, key >= block_size
    if not query_in_block:
        return not key_in_block and key <= query  # known tokens are causal and see no block
    if key_in_block:
        return True  # a block sees all of itself
    return key < known  # and the known tokens that were committed


@given(sync_cases())
def test_sync_mask_equals_the_loop(case: tuple[list[int], list[int], int, int]) -> None:
    prefix_len, known_len, block_size, max_prefix = case
    mask = sync_mask(prefix_len, known_len, block_size=block_size, max_prefix=max_prefix)
    assert mask.shape == (len(prefix_len), 2 * block_size, max_prefix + 2 * block_size)
    assert mask.dtype == torch.bool
    wrong = []
    for row, (prefix, known) in enumerate(zip(prefix_len, known_len, strict=True)):
        for query in range(2 * block_size):
            for column in range(max_prefix + 2 * block_size):
                expected = sees_in_words(
                    query, column, prefix=prefix, known=known, block_size=block_size, max_prefix=max_prefix
                )
                if bool(mask[row, query, column]) != expected:
                    wrong.append((row, query, column, expected))
    assert not wrong, f"(row, query, column, expected): {wrong}"


@given(prefix=st.integers(0, 6), num_tokens=st.integers(1, 6), spare=st.integers(0, 3))
def test_prefill_mask_is_causal(prefix: int, num_tokens: int, spare: int) -> None:
    layout = prefill_layout(prefix_len=prefix, num_tokens=num_tokens, device=CPU)
    mask = dense_mask(layout, max_prefix=prefix + spare)
    for query in range(num_tokens):
        row = [True] * prefix + [False] * spare + [key <= query for key in range(num_tokens)]
        assert mask[0, query].tolist() == row


@given(sync_cases())
def test_sync_mask_properties(case: tuple[list[int], list[int], int, int]) -> None:
    prefix_len, known_len, block_size, max_prefix = case
    mask = sync_mask(prefix_len, known_len, block_size=block_size, max_prefix=max_prefix)
    window = mask[:, :, max_prefix:]
    known_to_known, block_to_known = window[:, :block_size, :block_size], window[:, block_size:, :block_size]
    assert window.diagonal(dim1=1, dim2=2).all(), "a query does not see itself"
    assert not known_to_known.triu(1).any(), "a query sees a later known token"
    assert not window[:, :block_size, block_size:].any(), "a known token sees the block"
    for row, known in enumerate(known_len):
        assert not block_to_known[row, :, known:].any(), "the block sees a rejected token"


def test_columns_past_the_prefix_hide_what_is_there() -> None:
    # Row 0 has 1 cached token: columns 1 and 2 hold something else, which its keys 1 and 2 must not reach.
    mask = sync_mask([1, 3], [2, 2], block_size=2, max_prefix=3)
    assert not mask[0, :, 1:3].any()
    assert mask[1, :, :3].all()


def test_mask_reads_no_values() -> None:
    # Meta tensors have no values: any host read raises.
    lengths = torch.zeros(2, dtype=torch.int64, device="meta")
    layout = sync_layout(prefix_len=lengths, known_len=lengths, block_size=4)
    assert dense_mask(layout, max_prefix=5).shape == (2, 8, 13)
