"""Which tokens a drafter pass holds and what each of them may see, as three integers a token.

Owns `PackedLayout` and its builders. A pass runs N rows of W window tokens, every row behind its own cached
prefix. Imports torch only; turning a layout into a mask is the business of `masks.py`.

Legend: N rows, W window tokens, B block size. Key k of a row: k < prefix_len is cached token k, and
k = prefix_len + w is window token w.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedLayout:
    """One drafter pass. Query w of row n sees key k iff `k < ctx[n, w] or lo[n, w] <= k < hi[n, w]`.

    In words: a token sees the first `ctx` keys of its row and the segment `[lo, hi)` it belongs to. A causal
    token is a segment of one behind all earlier tokens; a draft block is a segment of B behind its context.

    All tensors are int64 on one device. Their values are never read on the host.

    Attributes:
        position_ids: `[N, W]` positions for the rotary embedding.
        ctx, lo, hi: `[N, W]` key indices as above.
        prefix_len: `[N]` cached tokens of each row.
        num_known: the first `num_known` tokens of every window are real tokens whose K/V is kept.
    """

    position_ids: torch.Tensor
    ctx: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor
    prefix_len: torch.Tensor
    num_known: int

    def __post_init__(self) -> None:
        assert self.position_ids.dim() == 2, f"position_ids is not [N, W]: {self.position_ids.shape}"
        shape, device = self.position_ids.shape, self.position_ids.device
        for name in ("position_ids", "ctx", "lo", "hi", "prefix_len"):
            tensor: torch.Tensor = getattr(self, name)
            expected = shape[:1] if name == "prefix_len" else shape
            assert tensor.shape == expected, f"{name} must be {tuple(expected)}, got {tuple(tensor.shape)}"
            assert tensor.dtype == torch.int64, f"{name} must be int64, got {tensor.dtype}"
            assert tensor.device == device, f"{name} is on {tensor.device}, position_ids on {device}"
        assert 0 <= self.num_known <= shape[1], f"num_known {self.num_known} is not in 0..{shape[1]}"

    @property
    def num_rows(self) -> int:
        """N."""
        return self.position_ids.shape[0]

    @property
    def num_window(self) -> int:
        """W."""
        return self.position_ids.shape[1]


def prefill_layout(*, prefix_len: int, num_tokens: int, device: torch.device) -> PackedLayout:
    """One row of `num_tokens` known tokens, read causally behind `prefix_len` cached ones."""
    index = prefix_len + torch.arange(num_tokens, device=device)[None, :]  # [1, W]
    return PackedLayout(
        position_ids=index,
        ctx=index,
        lo=index,
        hi=index + 1,
        prefix_len=torch.full((1,), prefix_len, dtype=torch.int64, device=device),
        num_known=num_tokens,
    )


def blocks_layout(
    *, prefix_len: torch.Tensor, num_known: int, context_len: torch.Tensor, block_size: int
) -> PackedLayout:
    """`num_known` real tokens, read causally, then R blocks to draft that do not see each other (paper, 3.4).

    Block r sees the first `context_len[n, r]` tokens of its row, cached or known, and itself, at the
    positions after them. Known tokens past its context are hidden from it. W = num_known + R * B.

    Args:
        prefix_len: `[N]` int64, cached tokens of each row.
        context_len: `[N, R]` int64, `prefix_len` to `prefix_len + num_known`.
    """
    num_rows, num_blocks = context_len.shape
    device = prefix_len.device
    known = prefix_len[:, None] + torch.arange(num_known, device=device)  # [N, num_known]
    in_block = torch.arange(block_size, device=device)  # [B]
    first = num_known + block_size * torch.arange(num_blocks, device=device)  # [R]
    shape = (num_rows, num_blocks, block_size)
    context = context_len[:, :, None].expand(shape)
    lo = (prefix_len[:, None] + first)[:, :, None].expand(shape)
    return PackedLayout(
        position_ids=torch.cat([known, (context + in_block).flatten(1)], dim=1),
        ctx=torch.cat([known, context.flatten(1)], dim=1),
        lo=torch.cat([known, lo.flatten(1)], dim=1),
        hi=torch.cat([known + 1, lo.flatten(1) + block_size], dim=1),
        prefix_len=prefix_len,
        num_known=num_known,
    )


def sync_layout(*, prefix_len: torch.Tensor, known_len: torch.Tensor, block_size: int) -> PackedLayout:
    """A synchronous draft: the block verified last, then the one block to draft, W = 2B.

    `known_len` `[N]` of the first B tokens are committed; the others are rejected candidates that only
    rejected candidates see and whose K/V the next pass overwrites.
    """
    context_len = (prefix_len + known_len)[:, None]
    return blocks_layout(
        prefix_len=prefix_len, num_known=block_size, context_len=context_len, block_size=block_size
    )
