"""The drafting side of a round: propose, draft ahead while the target verifies, resolve.

    proposal = drafting.propose(batch, indices)
    ahead = drafting.draft_ahead(batch, block, proposal)      # runs beside the target's verification
    verify = ...                                              # the target's
    drafting.resolve(batch, block, ahead, verify)

Synchronous drafting is the same round with nothing drafted ahead: every row then misses. Knows nothing of
SGLang.

Legend: N rows of a batch, B block size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from d3d_sglang.branch.planner import BranchPlanner
from d3d_sglang.branch.selector import select
from d3d_sglang.drafter.rows import DrafterRows, RowBatch
from d3d_sglang.proposals import ProposalStore
from d3d_sglang.spec_types import (
    BlockDrafts,
    BranchSet,
    DraftProposal,
    Origin,
    Selection,
    VerifyResult,
    moved,
    on_device,
)


@dataclass(frozen=True)
class Ahead:
    """What was drafted ahead of a verification, and the proposal being verified."""

    branches: BranchSet
    drafts: BlockDrafts
    current: DraftProposal


class Drafting:
    """Drafting for the rows of a server.

    Args:
        device: where batches come from and proposals are wanted, the target's.
        planner: which outcomes to draft ahead; None for synchronous drafting.
        sibling: the miss policy, see `branch.selector`.
    """

    def __init__(
        self,
        rows: DrafterRows,
        store: ProposalStore,
        *,
        device: torch.device,
        planner: BranchPlanner | None,
        sibling: bool,
    ) -> None:
        self._device = device
        self._on_drafter = rows.executor.model.device
        self.rows = rows
        self.origins: Counter[Origin] = Counter()  # (row, round) pairs by where their proposal came from
        self._store = store
        self._planner = planner
        self._sibling = sibling
        # Synchronous drafts read a block one round after it was verified.
        self._lag = rows.block_size if planner is None else 0

    def extend(self, row: int, token_ids: Sequence[int], *, prefix_len: int, generation: int) -> str | None:
        """Read the tokens of a row that starts or goes on reading; see `DrafterRows.extend`."""
        self._store.drop(row)
        return self.rows.extend(row, token_ids, prefix_len=prefix_len, generation=generation)

    def keep(self, row: int, *, host_len: int, token_ids: Callable[[], Sequence[int]]) -> bool:
        """Before a round: pages for what the row may write, and its full pages made reusable.

        Args:
            host_len: tokens of the row known to the host; `token_ids` gives them.

        Returns:
            False if there are no pages left: the row gets no drafts until it is extended again.
        """
        # The last token known may be the anchor, which the drafter has not read.
        self.rows.publish(row, token_ids, safe_len=host_len - 1 - self._lag)
        return self.rows.reserve(row, host_len=host_len)

    def state(self) -> dict[str, Any]:
        """JSON-ready counts for `/d3d/state`."""
        counted = {origin.name.lower(): self.origins[origin] for origin in Origin}
        return {
            "row_rounds_by_origin": counted,
            "packed_tokens": 0 if self._planner is None else self._planner.num_tokens,
            "pages": asdict(self.rows.pool.stats()),
        }

    def refuse(self, row: int, *, generation: int) -> bool:
        """Give a request no drafts at all; False if that has been said before."""
        self._store.drop(row)
        return self.rows.refuse(row, generation=generation)

    def propose(self, batch: RowBatch, indices: Sequence[int]) -> DraftProposal:
        """The proposals to verify; rows that have none are drafted now, on demand.

        Args:
            indices: `batch.rows` on the host.
        """
        batch = on_device(batch, self._on_drafter)
        origins = self._store.origins(indices)
        self.origins.update(origins)
        missing = [i for i, origin in enumerate(origins) if origin is Origin.REDRAFT]
        if len(missing) == len(indices):
            return on_device(self.rows.draft(batch), self._device)
        if missing:
            index = torch.tensor(missing).to(batch.rows.device, non_blocking=True)
            late = batch.subset(index)
            self._store.put_redrafted(late.rows, self.rows.draft(late), base_len=late.committed_len)
        waiting = self._store.take(batch.rows, committed_len=batch.committed_len)
        return on_device(waiting, self._device)

    def draft_ahead(self, batch: RowBatch, block: torch.Tensor, proposal: DraftProposal) -> Ahead | None:
        """Start the packed pass over `block` `[N, B]` = anchors and `proposal` (paper, section 3.4)."""
        if self._planner is None:
            return None
        batch, proposal = on_device(batch, self._on_drafter), on_device(proposal, self._on_drafter)
        block = moved(block, self._on_drafter)
        branches = self._planner.plan(block, proposal)
        drafts = self.rows.draft_ahead(batch, block, branches=branches)
        return Ahead(branches=branches, drafts=drafts, current=proposal)

    def resolve(
        self, batch: RowBatch, block: torch.Tensor, ahead: Ahead | None, verify: VerifyResult
    ) -> None:
        """Keep what the outcome of a verification makes of the drafts."""
        batch, verify = on_device(batch, self._on_drafter), on_device(verify, self._on_drafter)
        block = moved(block, self._on_drafter)
        usable = self.rows.commit(batch, block, accept_len=verify.accept_len)
        if ahead is None:
            return
        selection = select(
            ahead.branches, ahead.drafts, verify=verify, current=ahead.current, sibling=self._sibling
        )
        # A row that may not be drafted has nothing to wait for either.
        origin = torch.where(usable, selection.origin, int(Origin.NONE))
        has_tokens = usable & (origin != Origin.REDRAFT)
        proposal = replace(selection.proposal, prop_len=selection.proposal.prop_len * has_tokens)
        selection = Selection(proposal=proposal, origin=origin)
        self._store.put(batch.rows, selection, base_len=batch.committed_len + verify.accept_len + 1)
