"""The grid of branches against a slow loop over positions and tokens.

Legend: N rows, B block size, K support size, C coverage, F fanout, R branches.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d3d_sglang.branch.planner import BranchPlanner
from d3d_sglang.layout import blocks_layout
from d3d_sglang.spec_types import BranchSet, DraftProposal

VOCAB_SIZE = 40
UNSAID = object()  # a branch without a candidate: its tokens are arbitrary


@dataclass(frozen=True)
class Case:
    planner: BranchPlanner
    block: torch.Tensor  # [N, B]
    proposal: DraftProposal


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Random proposals whose candidates are anywhere in their supports, as sampled ones are."""
    block_size = draw(st.integers(2, 7))
    fanout = draw(st.integers(1, 3))
    planner = BranchPlanner(block_size, draw(st.integers(1, block_size)), fanout)
    prop_lens = draw(st.lists(st.integers(0, block_size - 1), min_size=1, max_size=4))
    return make_case(
        planner, prop_lens, support=fanout + draw(st.integers(1, 4)), seed=draw(st.integers(0, 999))
    )


def make_case(planner: BranchPlanner, prop_lens: list[int], *, support: int, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(prop_lens), planner.block_size - 1)
    ids = torch.rand(*shape, VOCAB_SIZE, generator=generator).argsort(dim=2)[:, :, :support]  # distinct
    tokens = ids.gather(2, torch.randint(support, (*shape, 1), generator=generator)).squeeze(2)
    anchors = torch.randint(VOCAB_SIZE, (shape[0], 1), generator=generator)
    proposal = DraftProposal(tokens, torch.tensor(prop_lens), ids, torch.ones_like(ids, dtype=torch.float32))
    return Case(planner, torch.cat([anchors, tokens], dim=1), proposal)


def branches_in_words(case: Case, row: int) -> list[tuple[int, object, int, bool]]:
    """(accept_len, anchor, context_offset, planned) of each branch of a row."""
    planner, prop_len = case.planner, int(case.proposal.prop_len[row])
    candidates = case.proposal.tokens[row].tolist()
    support = case.proposal.support_ids[row].tolist()
    branches: list[tuple[int, object, int, bool]] = []
    for accepted in range(planner.coverage - 1):
        others = [token for token in support[accepted] if token != candidates[accepted]]
        for token in others[: planner.fanout]:
            planned = accepted < prop_len
            branches.append((accepted, token if planned else UNSAID, accepted + 1, planned))
    last = candidates[prop_len - 1] if prop_len else int(case.block[row, 0])
    branches.append((prop_len, last, prop_len, True))
    return branches


def assert_planned(case: Case) -> BranchSet:
    found = case.planner.plan(case.block, case.proposal)
    for row in range(len(case.block)):
        expected = branches_in_words(case, row)
        tensors = (found.accept_len, found.anchor, found.context_offset, found.planned)
        columns = [tensor[row].tolist() for tensor in tensors]
        assert [len(column) for column in columns] == [case.planner.num_branches] * 4
        for branch, wanted in zip(zip(*columns, strict=True), expected, strict=True):
            assert all(a == b for a, b in zip(branch, wanted, strict=True) if b is not UNSAID)
    return found


@given(cases())
def test_branches_are_those_of_the_loop(case: Case) -> None:
    assert_planned(case)


@given(cases())
def test_anchors_of_a_position_are_distinct_and_never_its_candidate(case: Case) -> None:
    planner = case.planner
    rejected = case.planner.plan(case.block, case.proposal).anchor[:, :-1].unflatten(1, (-1, planner.fanout))
    for row in range(len(case.block)):
        for position in range(planner.coverage - 1):
            anchors = rejected[row, position].tolist()
            assert len(set(anchors)) == planner.fanout
            assert int(case.proposal.tokens[row, position]) not in anchors


@pytest.mark.parametrize("coverage", [1, 2, 4, 5])
def test_rows_of_different_prop_len_in_one_batch(coverage: int) -> None:
    block_size = 5
    prop_lens = [0, block_size - 2, block_size - 1, 1]
    found = assert_planned(make_case(BranchPlanner(block_size, coverage, 2), prop_lens, support=4))
    assert found.planned.sum(dim=1).tolist() == [2 * min(coverage - 1, n) + 1 for n in prop_lens]
    # Where nothing was proposed, the one outcome is that the target adds a token after the anchor.
    assert found.context_offset[0, -1] == found.accept_len[0, -1] == 0


def test_a_full_accept_branch_reads_all_candidates_but_the_last() -> None:
    case = make_case(BranchPlanner(4, 1, 1), [3, 2, 0], support=3)
    found = assert_planned(case)
    assert found.anchor[:, -1].tolist() == [
        int(case.block[0, 3]),
        int(case.block[1, 2]),
        int(case.block[2, 0]),
    ]
    assert found.context_offset[:, -1].tolist() == [3, 2, 0]


@pytest.mark.parametrize(
    ("block_size", "coverage", "fanout", "num_tokens"),
    [(16, 12, 2, 384), (16, 1, 5, 32), (4, 4, 1, 20), (2, 2, 3, 10)],  # B [(C-1) F + 2]
)
def test_a_packed_pass_has_the_tokens_of_equation_11(
    block_size: int, coverage: int, fanout: int, num_tokens: int
) -> None:
    planner = BranchPlanner(block_size, coverage, fanout)
    assert planner.num_tokens == num_tokens
    context_len = torch.zeros(1, planner.num_branches, dtype=torch.int64)
    layout = blocks_layout(
        prefix_len=torch.zeros(1, dtype=torch.int64),
        num_known=block_size,
        context_len=context_len,
        block_size=block_size,
    )
    assert layout.num_window == num_tokens


@pytest.mark.parametrize(
    ("coverage", "fanout", "message"),
    [
        (0, 1, "coverage is 0, allowed are 1 to the block size 4"),
        (5, 1, "coverage is 5"),
        (2, 0, "fanout is 0"),
    ],
)
def test_a_grid_that_does_not_fit_the_block_is_refused(coverage: int, fanout: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BranchPlanner(4, coverage, fanout)


def test_a_plan_reads_no_values() -> None:
    # Meta tensors have no values: any host read raises.
    case = make_case(BranchPlanner(4, 3, 2), [3, 1], support=5)
    proposal = DraftProposal(
        *(getattr(case.proposal, name).to("meta") for name in DraftProposal.__dataclass_fields__)
    )
    assert case.planner.plan(case.block.to("meta"), proposal).anchor.shape == (2, 5)
