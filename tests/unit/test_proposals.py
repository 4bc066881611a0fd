"""Proposals between rounds: kept by row, told to the host, used for the length they were made for only.

Legend: N rows, R rows in all, B block size, K support size.
"""

from __future__ import annotations

import torch

from d3d_sglang.proposals import ProposalStore
from d3d_sglang.spec_types import DraftProposal, Origin, Selection

NUM_ROWS, BLOCK_SIZE, SUPPORT = 6, 4, 3


def store() -> ProposalStore:
    return ProposalStore(
        num_rows=NUM_ROWS, block_size=BLOCK_SIZE, support=SUPPORT, device=torch.device("cpu")
    )


def proposal(*prop_lens: int, seed: int = 0) -> DraftProposal:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(prop_lens), BLOCK_SIZE - 1)
    return DraftProposal(
        tokens=torch.randint(100, shape, generator=generator),
        prop_len=torch.tensor(prop_lens),
        support_ids=torch.randint(100, (*shape, SUPPORT), generator=generator),
        support_probs=torch.rand(*shape, SUPPORT, generator=generator),
    )


def put(kept: ProposalStore, rows: list[int], waiting: DraftProposal, *, origins: list[Origin]) -> None:
    """Keep `waiting` for lengths 10 times the row."""
    selection = Selection(waiting, torch.tensor([int(origin) for origin in origins]))
    kept.put(torch.tensor(rows), selection, base_len=10 * torch.tensor(rows))


def take(kept: ProposalStore, rows: list[int], *, lengths: list[int] | None = None) -> DraftProposal:
    committed_len = 10 * torch.tensor(rows) if lengths is None else torch.tensor(lengths)
    return kept.take(torch.tensor(rows), committed_len=committed_len)


def assert_same(found: DraftProposal, expected: DraftProposal, *, order: list[int]) -> None:
    for name in DraftProposal.__dataclass_fields__:
        assert torch.equal(getattr(found, name), getattr(expected, name)[order]), name


def test_rows_have_nothing_waiting_at_first() -> None:
    assert store().origins(range(NUM_ROWS)) == [Origin.REDRAFT] * NUM_ROWS


def test_proposals_come_back_by_row_in_any_batch() -> None:
    kept, waiting = store(), proposal(3, 2, 0, 3)
    put(kept, [5, 1, 2, 3], waiting, origins=[Origin.HIT, Origin.FULL, Origin.NONE, Origin.SIBLING])
    assert kept.origins([1, 2, 3, 4, 5]) == [
        Origin.FULL,
        Origin.NONE,
        Origin.SIBLING,
        Origin.REDRAFT,
        Origin.HIT,
    ]
    assert_same(take(kept, [3, 5]), waiting, order=[3, 0])
    assert_same(take(kept, [1, 2, 3]), waiting, order=[1, 2, 3])


def test_a_later_round_of_other_rows_leaves_what_waits() -> None:
    kept, first, second = store(), proposal(3, 3), proposal(2, 3, seed=1)
    put(kept, [1, 2], first, origins=[Origin.HIT, Origin.HIT])
    put(kept, [2, 4], second, origins=[Origin.FULL, Origin.REDRAFT])
    assert kept.origins([1, 2, 4]) == [Origin.HIT, Origin.FULL, Origin.REDRAFT]
    assert_same(take(kept, [1]), first, order=[0])
    assert_same(take(kept, [2]), second, order=[0])


def test_a_proposal_for_another_length_has_no_candidates() -> None:
    kept, waiting = store(), proposal(3, 2, 3)
    put(kept, [1, 2, 3], waiting, origins=[Origin.HIT] * 3)
    assert take(kept, [1, 2, 3], lengths=[10, 21, 29]).prop_len.tolist() == [3, 0, 0]
    assert take(kept, [1, 2, 3]).prop_len.tolist() == [3, 2, 3], "looking does not take it away"


def test_what_was_drafted_on_demand_is_taken_with_the_rest() -> None:
    kept, waiting, late = store(), proposal(3, 0, 3), proposal(3, seed=1)
    put(kept, [1, 2, 3], waiting, origins=[Origin.HIT, Origin.REDRAFT, Origin.FULL])
    kept.put_redrafted(torch.tensor([2]), late, base_len=torch.tensor([20]))
    assert kept.origins([1, 2, 3]) == [Origin.HIT, Origin.REDRAFT, Origin.FULL]
    together = take(kept, [1, 2, 3])
    assert together.prop_len.tolist() == [3, 3, 3]
    assert torch.equal(together.tokens, torch.stack([waiting.tokens[0], late.tokens[0], waiting.tokens[2]]))
    # A round that puts others tells the host about all rows.
    put(kept, [4], proposal(3), origins=[Origin.HIT])
    assert kept.origins([1, 2, 3, 4]) == [Origin.HIT, Origin.REDRAFT, Origin.FULL, Origin.HIT]


def test_a_dropped_row_has_nothing_waiting_and_stays_so() -> None:
    kept = store()
    put(kept, [1, 2], proposal(3, 3), origins=[Origin.HIT, Origin.NONE])
    kept.drop(1)
    kept.drop(2)
    assert kept.origins([1, 2]) == [Origin.REDRAFT, Origin.REDRAFT]
    put(kept, [3], proposal(3), origins=[Origin.HIT])
    assert kept.origins([1, 2, 3]) == [Origin.REDRAFT, Origin.REDRAFT, Origin.HIT]
