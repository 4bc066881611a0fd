"""Drafting for request rows: what each row has in the drafter's cache, and whether its draft may be used.

State lives in device tensors indexed by request row and is reset when a row is extended, never when a request
ends: ends are not always announced. A row's draft is used only if the drafter's length equals the committed
length it is drafted for, so a row that was missed for any reason decodes plainly instead of badly.

Legend: N rows of a batch, R rows in all, B block size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from d3d_sglang.drafter.executor import DrafterExecutor
from d3d_sglang.spec_types import DraftProposal

# Cached length of a row the drafter has not read: so far from any committed length that adding blocks to it
# never meets one.
UNREAD = -(2**40)


class DrafterRows:
    """Synchronous drafting over rows of an executor's cache.

    Args:
        max_positions: positions the drafter was trained for; a block must end before it.
        device: where proposals are wanted (the target's device).
    """

    def __init__(self, executor: DrafterExecutor, *, max_positions: int, device: torch.device) -> None:
        num_rows, block_size = executor.cache.shape.num_rows, executor.block_size
        self.executor = executor
        self.block_size = block_size
        self.max_length = min(max_positions, executor.cache.usable)
        self._device = device
        on_drafter = executor.model.device
        self._cached_len = torch.zeros(num_rows, dtype=torch.int64, device=on_drafter)  # [R]
        self._known_len = torch.zeros(num_rows, dtype=torch.int64, device=on_drafter)  # [R]
        self._block = torch.zeros(num_rows, block_size, dtype=torch.int64, device=on_drafter)  # [R, B]
        # Host side: the request a row serves and how much of its prompt the drafter has read.
        self._generation = [-1] * num_rows
        self._prompt_len = [0] * num_rows

    def extend(self, row: int, token_ids: Sequence[int], *, prefix_len: int, generation: int) -> bool:
        """Read a request's tokens: `token_ids` are all so far, the first `prefix_len` not new to the target.

        A further chunk of the same request continues where the last one ended. Everything else (a new
        request, a prefix the target had cached, a retracted request that is back) is read from the start.

        Returns:
            False if the request is too long for the drafter: the row then gets no drafts.
        """
        continues = generation == self._generation[row] and prefix_len == self._prompt_len[row]
        start = prefix_len if continues else 0
        self._generation[row] = generation
        self._prompt_len[row] = len(token_ids)
        self._known_len[row] = 0
        self._cached_len[row] = UNREAD
        if len(token_ids) + self.block_size > self.max_length:
            return False
        self.executor.prefill(row, token_ids[start:], start=start)
        self._cached_len[row] = len(token_ids)
        return True

    def draft(
        self, rows: torch.Tensor, *, anchor: torch.Tensor, committed_len: torch.Tensor, bound: int
    ) -> DraftProposal:
        """Draft a block for every row.

        Args:
            rows: `[N]`; anchor: `[N]` last committed tokens; committed_len: `[N]` tokens before the anchor.
            bound: host-side upper bound on `committed_len`.
        """
        rows, anchor, committed_len = (
            x.to(self.executor.model.device, non_blocking=True) for x in (rows, anchor, committed_len)
        )
        cached_len, known_len = self._cached_len[rows], self._known_len[rows]
        prefix_len = cached_len.clamp(0, self.executor.cache.usable)
        tokens = self.executor.draft(
            rows,
            self._block[rows],
            known_len=known_len,
            prefix_len=prefix_len,
            anchor=anchor,
            max_prefix=min(bound, self.executor.cache.usable),
        )
        cached_len = cached_len + known_len
        self._cached_len[rows] = cached_len
        self._known_len[rows] = 0
        usable = (cached_len == committed_len) & (committed_len + self.block_size <= self.max_length)
        prop_len = usable * (self.block_size - 1)
        return DraftProposal(tokens=tokens.to(self._device), prop_len=prop_len.to(self._device))

    def commit(self, rows: torch.Tensor, block: torch.Tensor, *, accept_len: torch.Tensor) -> None:
        """Remember a verified block `[N, B]` of which the anchor and `accept_len` `[N]` candidates stay."""
        rows, block, accept_len = (
            x.to(self.executor.model.device, non_blocking=True) for x in (rows, block, accept_len)
        )
        self._block[rows] = block
        self._known_len[rows] = accept_len + 1

    def skip(self, row: int) -> None:
        """Give a row no drafts until it is extended again."""
        self._generation[row] = -1
        self._cached_len[row] = UNREAD

    def clear(self) -> None:
        """Forget every row; running requests go on without drafts."""
        self._generation = [-1] * len(self._generation)
        self._cached_len.fill_(UNREAD)
