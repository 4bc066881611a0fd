"""Which outcomes of a verification to draft ahead (paper, section 3.4): a grid of positions and anchors.

Rejection branch (k, t): candidate k is rejected, the target says t instead; t ranges over the F most likely
drafter tokens of that position other than the candidate. Full-accept branch: every candidate stands; the
bonus is not known yet, so the last candidate is the anchor and the first predicted token the bonus's guess.
Imports `spec_types` only; nothing here reads a tensor's values on the host.

Legend: N rows, B block size, K support size, C coverage, F fanout, R = (C-1) F + 1 branches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from d3d_sglang.spec_types import BranchSet, DraftProposal


@dataclass(frozen=True)
class BranchPlanner:
    """The paper's grid. Needs proposals whose support holds more than F tokens."""

    block_size: int
    coverage: int
    fanout: int

    def __post_init__(self) -> None:
        if not 1 <= self.coverage <= self.block_size:
            raise ValueError(
                f"coverage is {self.coverage}, allowed are 1 to the block size {self.block_size}"
            )
        if self.fanout < 1:
            raise ValueError(f"fanout is {self.fanout}, allowed are 1 and more")

    @property
    def num_branches(self) -> int:
        """R."""
        return (self.coverage - 1) * self.fanout + 1

    @property
    def num_tokens(self) -> int:
        """Tokens of a packed pass, `B [(C-1) F + 2]` (paper, equation 11)."""
        return self.block_size * (self.num_branches + 1)

    def plan(self, block: torch.Tensor, proposal: DraftProposal) -> BranchSet:
        """Branches for the verification of `block` `[N, B]` = anchor and `proposal`."""
        positions = self.coverage - 1  # rejection positions drafted ahead
        accepted = torch.arange(positions, device=block.device).repeat_interleave(self.fanout)  # [(C-1) F]
        accepted = accepted.expand(block.shape[0], -1)
        anchors = self._alternatives(proposal).flatten(1)  # [N, (C-1) F]
        prop_len = proposal.prop_len[:, None]  # [N, 1]
        last = block.gather(1, prop_len)  # the last candidate, or the anchor where there is none
        return BranchSet(
            accept_len=torch.cat([accepted, prop_len], dim=1),
            anchor=torch.cat([anchors, last], dim=1),
            # Tokens of the block each branch builds on: the anchor and what is accepted of it; the last
            # candidate of the full branch is that branch's own anchor.
            context_offset=torch.cat([accepted + 1, prop_len], dim=1),
            planned=torch.cat([accepted < prop_len, torch.ones_like(prop_len, dtype=torch.bool)], dim=1),
        )

    def _alternatives(self, proposal: DraftProposal) -> torch.Tensor:
        """`[N, C-1, F]`: the most likely tokens of each position, the candidate left out."""
        ids = proposal.support_ids[:, : self.coverage - 1]  # [N, C-1, K], most likely first
        is_candidate = ids == proposal.tokens[:, : self.coverage - 1, None]
        order = is_candidate.to(torch.int8).argsort(
            dim=2, stable=True
        )  # candidate last, others keep their order
        return ids.gather(2, order[:, :, : self.fanout])
