"""Drafting for request rows: what each row has in the drafter's cache, and whether its draft may be used.

State lives in device tensors indexed by request row and is reset when a row is extended, never when a request
ends: ends are not always announced. A row's draft is used only if the drafter's length equals the committed
length it is drafted for, so a row that was missed for any reason decodes plainly instead of badly.

Legend: N rows of a batch, R rows in all, B block size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from d3d_sglang.drafter.executor import BlockRequest, DrafterExecutor, DraftSampling
from d3d_sglang.drafter.page_pool import PagePool
from d3d_sglang.spec_types import BlockDrafts, BranchSet, DraftProposal

# Cached length of a row the drafter has not read: so far from any committed length that adding blocks to it
# never meets one.
UNREAD = -(2**40)
Alive = Callable[[int, int], bool]
NOBODY = -1  # generation of a row that serves no request


@dataclass(frozen=True)
class RowBatch:
    """Rows of a decode batch.

    Attributes:
        rows: `[N]`; anchor: `[N]` last committed tokens; committed_len: `[N]` tokens before the anchor.
        bound: host-side upper bound on `committed_len`.
        sampling: how the rows draw drafts, None if all are greedy.
    """

    rows: torch.Tensor
    anchor: torch.Tensor
    committed_len: torch.Tensor
    bound: int
    sampling: DraftSampling | None

    def subset(self, index: torch.Tensor) -> RowBatch:
        """The rows at `index` `[M]`."""
        sampling = self.sampling
        if sampling is not None:
            sampling = DraftSampling(
                sampling.temperature[index], sampling.greedy[index], sampling.seeds[index]
            )
        return RowBatch(self.rows[index], self.anchor[index], self.committed_len[index], self.bound, sampling)


class DrafterRows:
    """Drafts over rows of an executor's cache.

    Args:
        max_positions: positions the drafter was trained for; a block must end before it.
        alive: gives a predicate of (row, generation): is that request still there? Pages of the others are
            taken back when a row starts and when pages are short.
        packed: a packed pass reads every verified block (asynchronous drafting). Otherwise the next draft
            reads the block verified before it.
    """

    def __init__(
        self,
        executor: DrafterExecutor,
        pool: PagePool,
        *,
        max_positions: int,
        packed: bool,
        alive: Callable[[], Alive] = lambda: lambda _row, _generation: True,
    ) -> None:
        shape, device = executor.cache.shape, executor.model.device
        self.executor = executor
        self.pool = pool
        self.block_size = executor.block_size
        self.max_length = min(max_positions, shape.max_length)
        self._packed = packed
        self._alive = alive
        self._cached_len = torch.full((shape.num_rows,), UNREAD, dtype=torch.int64, device=device)  # [R]
        self._known_len = torch.zeros_like(self._cached_len)  # [R]
        self._block = torch.zeros(shape.num_rows, self.block_size, dtype=torch.int64, device=device)  # [R, B]
        # Host side: the request a row serves or has been refused, how much of it the drafter has read, its
        # pages, and how many of them are reusable.
        self._generation = [NOBODY] * shape.num_rows
        self._refused = [NOBODY] * shape.num_rows
        self._read_len = [0] * shape.num_rows
        self._num_pages = [0] * shape.num_rows
        self._num_shareable = [0] * shape.num_rows
        self._reserve = 3 * self.block_size

    def extend(self, row: int, token_ids: Sequence[int], *, prefix_len: int, generation: int) -> str | None:
        """Read a request's tokens: `token_ids` are all so far, the first `prefix_len` not new to the target.

        A further chunk of the same request continues where the last one ended. Anything else (a new request,
        a prefix the target had cached, a retracted request that is back) starts from what pages there are.

        Returns:
            Why the row gets no drafts from here on, `too_long` or `out_of_pages`, said once; else None.
        """
        self._known_len[row] = 0
        self._cached_len[row] = UNREAD
        if generation == self._refused[row]:
            return None
        if len(token_ids) + self.block_size > self.max_length:
            self.refuse(row, generation=generation)
            return "too_long"
        if generation == self._generation[row] and prefix_len == self._read_len[row]:
            start = prefix_len
            has_room = self.reserve(row, host_len=len(token_ids))
            if has_room:
                self.pool.count_read(len(token_ids) - start)
        else:
            self.pool.sweep(self._alive())
            grant = self.pool.begin(row, token_ids, generation=generation, reserve=self._reserve)
            has_room = grant is not None
            if grant is not None:
                start = grant.shared_len
                self._num_pages[row] = 0
                self._add_pages(row, grant.pages)
        if not has_room:
            self.refuse(row, generation=generation)
            return "out_of_pages"
        self._generation[row] = generation
        self._read_len[row] = len(token_ids)
        self.executor.prefill(row, token_ids[start:], start=start)
        self._cached_len[row] = len(token_ids)
        self._num_shareable[row] = 0
        self.publish(row, lambda: token_ids, safe_len=len(token_ids))
        return None

    def reserve(self, row: int, *, host_len: int) -> bool:
        """Make room for the blocks a row may write next; `host_len` tokens of it are known to the host.

        Returns:
            False if there are no pages left: the row gets no drafts until it is extended again.
        """
        if self._generation[row] == NOBODY:
            return True  # it gets no drafts, and that has been said
        length = min(host_len + self._reserve, self.max_length)
        pages = self.pool.grow(row, length=length)
        if pages is None:
            self.pool.sweep(self._alive())
            pages = self.pool.grow(row, length=length)
        if pages is None:
            self.skip(row)
            return False
        self._add_pages(row, pages)
        return True

    def publish(self, row: int, token_ids: Callable[[], Sequence[int]], *, safe_len: int) -> None:
        """Make the full pages of a row's first `safe_len` tokens reusable, if there are new ones."""
        safe_len = min(safe_len, self.max_length)  # a row has no pages past it
        if safe_len // self.executor.cache.shape.page_size > self._num_shareable[row]:
            self._num_shareable[row] = safe_len // self.executor.cache.shape.page_size
            self.pool.publish(row, token_ids(), safe_len=safe_len)

    def draft(self, batch: RowBatch) -> DraftProposal:
        """Draft one block for every row, on demand."""
        rows, cached_len = batch.rows, self._cached_len[batch.rows]
        known_len = self._known_len[rows]
        context_len = cached_len + known_len
        prefix_len = cached_len.clamp(min=0)
        drafts = self.executor.draft(
            BlockRequest(
                rows=rows,
                prefix_len=prefix_len,
                known=self._block[rows][:, : 0 if self._packed else self.block_size],
                anchors=batch.anchor[:, None],
                context_len=(prefix_len + known_len)[:, None],
                max_prefix=min(batch.bound, self.executor.cache.shape.max_length),
            ),
            batch.sampling,
        )
        self._cached_len[rows] = context_len
        self._known_len[rows] = 0
        return DraftProposal(
            tokens=drafts.tokens[:, 0],
            prop_len=self._usable(context_len, batch.committed_len) * (self.block_size - 1),
            support_ids=drafts.support_ids[:, 0],
            support_probs=drafts.support_probs[:, 0],
        )

    def draft_ahead(self, batch: RowBatch, block: torch.Tensor, *, branches: BranchSet) -> BlockDrafts:
        """The packed pass: read `block` `[N, B]`, which is being verified, and draft all `branches` of it."""
        prefix_len = self._cached_len[batch.rows].clamp(min=0)
        return self.executor.draft(
            BlockRequest(
                rows=batch.rows,
                prefix_len=prefix_len,
                known=block,
                anchors=branches.anchor,
                context_len=prefix_len[:, None] + branches.context_offset,
                max_prefix=min(batch.bound, self.executor.cache.shape.max_length),
            ),
            batch.sampling,
        )

    def commit(self, batch: RowBatch, block: torch.Tensor, *, accept_len: torch.Tensor) -> torch.Tensor:
        """A block `[N, B]` was verified: its anchor and `accept_len` `[N]` candidates stay.

        Returns:
            `[N]` bool, rows whose next block may be drafted.
        """
        rows = batch.rows
        if not self._packed:
            self._block[rows] = block
            self._known_len[rows] = accept_len + 1
            return torch.ones_like(rows, dtype=torch.bool)
        cached_len = self._cached_len[rows]
        usable = self._usable(cached_len, batch.committed_len)
        cached_len = cached_len + accept_len + 1
        self._cached_len[rows] = cached_len
        return usable & (cached_len + self.block_size <= self.max_length)

    def refuse(self, row: int, *, generation: int) -> bool:
        """Give a request no drafts at all; False if that has been said before."""
        self.skip(row)
        is_new = self._refused[row] != generation
        self._refused[row] = generation
        return is_new

    def _add_pages(self, row: int, pages: Sequence[int]) -> None:
        if pages:
            self.executor.cache.assign(row, pages, first=self._num_pages[row])
            self._num_pages[row] += len(pages)

    def skip(self, row: int) -> None:
        """Give a row no drafts until it is extended again."""
        self._generation[row] = NOBODY
        self._cached_len[row] = UNREAD
        # The row may be in a few rounds more, and what it writes in them must not reach anybody's page.
        self.executor.cache.assign(row, (), first=0)
        self.pool.release(row)
        self._num_pages[row] = 0

    def clear(self) -> None:
        """Forget every row; running requests go on without drafts."""
        self.pool.clear()
        self.executor.cache.unassign_all()
        self._generation = [NOBODY] * len(self._generation)
        self._cached_len.fill_(UNREAD)

    def _usable(self, cached_len: torch.Tensor, committed_len: torch.Tensor) -> torch.Tensor:
        return (cached_len == committed_len) & (committed_len + self.block_size <= self.max_length)
