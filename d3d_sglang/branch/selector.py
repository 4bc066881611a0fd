"""Which prepared branch came true, and the next proposal it gives.

A hit is an exact match of (accept length, bonus). What a row that missed does is the miss policy: `redraft`
leaves it without a proposal, so a block is drafted on demand (the paper); `sibling` reuses the nearest tokens
there are, so no row ever waits. The choice reads only the outcome and the branches' keys, never a token that
is still to be verified, which is what keeps sampling exact. Imports `spec_types` only.

Legend: N rows, B block size, K support size, R branches.
"""

from __future__ import annotations

import torch

from d3d_sglang.spec_types import BlockDrafts, BranchSet, DraftProposal, Origin, Selection, VerifyResult


def select(
    branches: BranchSet, drafts: BlockDrafts, *, verify: VerifyResult, current: DraftProposal, sibling: bool
) -> Selection:
    """Next proposals after a verification.

    Args:
        drafts: what the packed pass drafted for `branches`, the full-accept branch last.
        current: the proposal that was verified.
        sibling: give rows that missed the nearest tokens instead of nothing.
    """
    full = branches.accept_len.shape[1] - 1
    keys = torch.cat([branches.anchor[:, :full], drafts.tokens[:, full:, 0]], dim=1)  # [N, R]
    outcome = (branches.accept_len == verify.accept_len[:, None]) & branches.planned
    match = outcome & (keys == verify.bonus[:, None])
    hit = match.any(dim=1)
    # Without a match: the first branch of the same accept length, if there is one.
    chosen = torch.where(hit, match.to(torch.int8).argmax(dim=1), outcome.to(torch.int8).argmax(dim=1))
    near = outcome.any(dim=1)
    shift = (chosen == full).to(torch.int64)  # the full branch's first token is the bonus or was to be
    proposal = _shifted(_branch(drafts, chosen), shift)
    origin = torch.where(shift.bool(), Origin.FULL, Origin.HIT)
    if not sibling:
        return Selection(proposal=proposal, origin=torch.where(hit, origin, Origin.REDRAFT))
    rest = _shifted(current, verify.accept_len + 1)
    return Selection(proposal=_where(near, proposal, rest), origin=torch.where(hit, origin, Origin.SIBLING))


def _branch(drafts: BlockDrafts, index: torch.Tensor) -> DraftProposal:
    """Branch `index` `[N]` of every row as a whole block."""
    row = torch.arange(index.shape[0], device=index.device)
    tokens = drafts.tokens[row, index]
    return DraftProposal(
        tokens=tokens,
        prop_len=torch.full_like(index, tokens.shape[1]),
        support_ids=drafts.support_ids[row, index],
        support_probs=drafts.support_probs[row, index],
    )


def _shifted(proposal: DraftProposal, shift: torch.Tensor) -> DraftProposal:
    """The proposal without its first `shift` `[N]` candidates; the columns left over repeat the last one."""
    width = proposal.tokens.shape[1]
    column = (torch.arange(width, device=shift.device) + shift[:, None]).clamp(max=width - 1)  # [N, B-1]
    wide = column[:, :, None].expand_as(proposal.support_ids)
    return DraftProposal(
        tokens=proposal.tokens.gather(1, column),
        prop_len=(proposal.prop_len - shift).clamp(min=0),
        support_ids=proposal.support_ids.gather(1, wide),
        support_probs=proposal.support_probs.gather(1, wide),
    )


def _where(condition: torch.Tensor, one: DraftProposal, other: DraftProposal) -> DraftProposal:
    """Rows of `one` where `condition` `[N]`, of `other` elsewhere."""
    return DraftProposal(
        tokens=torch.where(condition[:, None], one.tokens, other.tokens),
        prop_len=torch.where(condition, one.prop_len, other.prop_len),
        support_ids=torch.where(condition[:, None, None], one.support_ids, other.support_ids),
        support_probs=torch.where(condition[:, None, None], one.support_probs, other.support_probs),
    )
