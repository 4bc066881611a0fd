"""Which branch came true, against a slow loop, for every outcome of small blocks.

Legend: N rows, B block size, K support size, R branches, C coverage, F fanout.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch

from d3d_sglang.branch.planner import BranchPlanner
from d3d_sglang.branch.selector import select
from d3d_sglang.spec_types import BlockDrafts, BranchSet, DraftProposal, Origin, VerifyResult

VOCAB_SIZE, SUPPORT = 7, 5
DRAFTS = 4  # for each outcome
GRIDS = [(2, 1, 1), (2, 2, 1), (3, 1, 1), (3, 2, 2), (3, 3, 1), (4, 4, 2)]  # B, C, F

# A proposal as (token, support ids, support probabilities) of each candidate.
Candidates = list[tuple[int, list[int], list[float]]]


@dataclass(frozen=True)
class Case:
    branches: BranchSet
    drafts: BlockDrafts
    current: DraftProposal
    verify: VerifyResult

    def select(self, *, sibling: bool) -> tuple[DraftProposal, list[int]]:
        selection = select(
            self.branches, self.drafts, verify=self.verify, current=self.current, sibling=sibling
        )
        return selection.proposal, selection.origin.tolist()


def random_drafts(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, support and probabilities, all different from place to place."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(*shape, VOCAB_SIZE, generator=generator).argsort(dim=-1)[..., :SUPPORT]
    chosen = torch.randint(SUPPORT, (*shape, 1), generator=generator)
    return ids.gather(-1, chosen).squeeze(-1), ids, torch.rand(*shape, SUPPORT, generator=generator)


def every_outcome(block_size: int, coverage: int, fanout: int) -> Case:
    """Rows for each prop_len, accept_len and bonus there can be, with some different drafts for each."""
    width = block_size - 1
    outcomes = [
        (prop_len, accept_len, bonus)
        for prop_len, bonus, _ in product(range(width + 1), range(VOCAB_SIZE), range(DRAFTS))
        for accept_len in range(prop_len + 1)
    ]
    prop_len, accept_len, bonus = (torch.tensor(column) for column in zip(*outcomes, strict=True))
    tokens, ids, probs = random_drafts(len(outcomes), width, seed=block_size)
    current = DraftProposal(tokens, prop_len, ids, probs)
    planner = BranchPlanner(block_size, coverage, fanout)
    block = torch.cat([torch.zeros(len(outcomes), 1, dtype=torch.int64), tokens], dim=1)
    drafts = BlockDrafts(*random_drafts(len(outcomes), planner.num_branches, width, seed=100 + block_size))
    verify = VerifyResult(block, accept_len, bonus)
    return Case(planner.plan(block, current), drafts, current, verify)


def candidates(tokens: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> Candidates:
    return list(zip(tokens.tolist(), ids.tolist(), probs.tolist(), strict=True))


def selection_in_words(case: Case, row: int, *, sibling: bool) -> tuple[Candidates, Origin]:
    """The next candidates of a row and where they come from."""
    branches, drafts = case.branches, case.drafts
    accept_len, bonus = int(case.verify.accept_len[row]), int(case.verify.bonus[row])
    prop_len, full = int(case.current.prop_len[row]), branches.anchor.shape[1] - 1
    fallback: Candidates | None = None
    for r in range(full + 1):
        block = candidates(drafts.tokens[row, r], drafts.support_ids[row, r], drafts.support_probs[row, r])
        if not branches.planned[row, r] or int(branches.accept_len[row, r]) != accept_len:
            continue
        is_full = accept_len == prop_len
        assert is_full == (r == full)
        key = block[0][0] if is_full else int(branches.anchor[row, r])
        usable = block[1:] if is_full else block
        if key == bonus:
            return usable, Origin.FULL if is_full else Origin.HIT
        fallback = fallback or usable
    if not sibling:
        return [], Origin.REDRAFT
    current = case.current
    rest = candidates(current.tokens[row], current.support_ids[row], current.support_probs[row])
    return rest[accept_len + 1 : prop_len] if fallback is None else fallback, Origin.SIBLING


@pytest.mark.parametrize("sibling", [False, True])
@pytest.mark.parametrize(("block_size", "coverage", "fanout"), GRIDS)
def test_every_outcome_selects_what_the_loop_does(
    block_size: int, coverage: int, fanout: int, sibling: bool
) -> None:
    case = every_outcome(block_size, coverage, fanout)
    proposal, origins = case.select(sibling=sibling)
    seen = set()
    for row, origin in enumerate(origins):
        expected, expected_origin = selection_in_words(case, row, sibling=sibling)
        assert origin == expected_origin
        seen.add(expected_origin)
        if origin == Origin.REDRAFT:
            continue  # the proposal is arbitrary
        assert int(proposal.prop_len[row]) == len(expected)
        found = candidates(proposal.tokens[row], proposal.support_ids[row], proposal.support_probs[row])
        assert found[: len(expected)] == expected
    assert seen == {Origin.FULL, Origin.SIBLING if sibling else Origin.REDRAFT} | (
        {Origin.HIT} if coverage > 1 else set()
    )


def test_prop_lens_after_each_origin() -> None:
    case = every_outcome(4, 3, 1)
    proposal, origins = case.select(sibling=True)
    lens = {origin: set() for origin in Origin}
    for origin, prop_len in zip(origins, proposal.prop_len.tolist(), strict=True):
        lens[Origin(origin)].add(prop_len)
    assert (lens[Origin.HIT], lens[Origin.FULL]) == ({3}, {2})
    # The likeliest branch, the full one from its second token, the rest of the current proposal.
    assert lens[Origin.SIBLING] == {3, 2, 0}


def test_a_branch_that_was_not_planned_is_never_chosen() -> None:
    """Its key may be right by chance: the row has no candidate at that position."""
    case = every_outcome(4, 4, 2)
    rows = (case.current.prop_len == 1).nonzero().flatten().tolist()
    _, origins = case.select(sibling=False)
    for row in rows:
        if int(case.verify.accept_len[row]) == 1:
            guess = int(case.drafts.tokens[row, -1, 0])
            expected = Origin.FULL if guess == int(case.verify.bonus[row]) else Origin.REDRAFT
            assert origins[row] == expected


@pytest.mark.parametrize("sibling", [False, True])
def test_a_selection_does_not_depend_on_tokens_to_be_verified(sibling: bool) -> None:
    """Only keys count, which for the full branch is its first token: that keeps sampling exact."""
    case = every_outcome(4, 3, 2)
    other = case.drafts.tokens.clone()
    other[:, :-1] = (other[:, :-1] + 1) % VOCAB_SIZE
    other[:, -1, 1:] = (other[:, -1, 1:] + 1) % VOCAB_SIZE
    drafts = BlockDrafts(other, case.drafts.support_ids, case.drafts.support_probs)
    changed = Case(case.branches, drafts, case.current, case.verify)
    proposal, origins = case.select(sibling=sibling)
    changed_proposal, changed_origins = changed.select(sibling=sibling)
    assert changed_origins == origins
    assert torch.equal(changed_proposal.prop_len, proposal.prop_len)
    assert torch.equal(changed_proposal.support_ids, proposal.support_ids)
    assert not torch.equal(changed_proposal.tokens, proposal.tokens)
