"""Stands in for the drafter's executor: keeps tokens where the real one keeps K/V, and drafts from them.

A block's candidates are a function of the tokens it would see, read back through the row's pages. So a wrong
page, length or context gives other candidates, as it does with a network. Tokens go through the host in every
call, which a real drafter must never do.

Legend: N rows of a batch, R blocks a row, B block size, K support size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from d3d_sglang.drafter.executor import BlockRequest, DraftSampling
from d3d_sglang.drafter.kv_cache import PagedCache
from d3d_sglang.spec_types import BlockDrafts

UNWRITTEN = -1


class TokenExecutor:
    """Has what the worker's side uses of `DrafterExecutor`; subclasses say what is drafted.

    Args:
        model: says which device to draft on.
        cache: the real one, for its pages.
    """

    def __init__(
        self, model: Any, cache: PagedCache, *, block_size: int, mask_token_id: int, support: int
    ) -> None:
        self.model = model
        self.cache = cache
        self.block_size = block_size
        self.support = support
        num_slots = (cache.shape.num_pages + 1) * cache.shape.page_size
        self._tokens = torch.full((num_slots,), UNWRITTEN, device=model.device)  # by slot

    def ranked(self, row: int, tokens: list[int]) -> list[list[int]]:
        """The K most likely tokens of each of the B-1 positions after `tokens`, whose last is the anchor.

        The first of each is the candidate; a row's K tokens are distinct.
        """
        raise NotImplementedError

    def prefill(self, row: int, token_ids: Sequence[int], *, start: int) -> None:
        """Read `token_ids` at positions `start`.. of `row`."""
        rows = torch.tensor([row], device=self.model.device)
        tokens = torch.tensor([list(token_ids)], device=self.model.device, dtype=torch.int64)
        self._write(rows, tokens, start=torch.tensor([start], device=self.model.device))

    def draft(self, request: BlockRequest, sampling: DraftSampling | None) -> BlockDrafts:
        """Point masses, drafted block by block; rows that sample are no exception."""
        max_length = self.cache.shape.max_length
        assert int(request.prefix_len.clamp(max=max_length).max()) <= request.max_prefix, (
            f"the prefixes {request.prefix_len.tolist()} exceed the bound {request.max_prefix}"
        )
        self._write(request.rows, request.known, start=request.prefix_len)
        num_tokens = int(request.context_len.max())
        histories = self.history(request.rows, num_tokens)
        ranked = [
            [
                self.ranked(row, [*tokens[:length], anchor])
                for length, anchor in zip(lengths, anchors, strict=True)
            ]
            for row, tokens, lengths, anchors in zip(
                request.rows.tolist(),
                histories,
                request.context_len.tolist(),
                request.anchors.tolist(),
                strict=True,
            )
        ]
        ids = torch.tensor(ranked, device=self.model.device)  # [N, R, B-1, K]
        probs = torch.zeros_like(ids, dtype=torch.float32)
        probs[..., 0] = 1.0
        return BlockDrafts(tokens=ids[..., 0], support_ids=ids, support_probs=probs)

    def history(self, rows: torch.Tensor, num_tokens: int) -> list[list[int]]:
        """The first `num_tokens` tokens of every row, as they are read through its pages."""
        positions = torch.arange(num_tokens, device=rows.device).expand(len(rows), -1)
        read: list[list[int]] = self._tokens[self.cache.slots(rows, positions)].tolist()
        return read

    def _write(self, rows: torch.Tensor, tokens: torch.Tensor, *, start: torch.Tensor) -> None:
        """Keep `tokens` `[N, W]` from positions `start` `[N]` on."""
        positions = start[:, None] + torch.arange(tokens.shape[1], device=rows.device)
        self._tokens[self.cache.slots(rows, positions)] = tokens
