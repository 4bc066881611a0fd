"""Walks over a known answer against the reference method, round by round; counts by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d3d_sglang.reference import Generation, Method, Round
from train.acceptance import (
    ORIGINS,
    Acceptance,
    AnswerDrafts,
    WalkCounts,
    WalkRound,
    async_walk,
    sync_walk,
)

VOCAB = 12
END = VOCAB - 1
PROMPT = [1, 2, 3]


class ScriptedDrafter:
    """Random logits at every anchor of a random answer; with probability `skill` a position knows its token.

    Away from the answer's own text it says something else, which nobody should ever ask for twice.
    """

    def __init__(self, *, answer_len: int, block_size: int, skill: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.answer = torch.randint(END, (answer_len,), generator=generator).tolist()
        self.answer[-1] = END
        self.table = torch.rand(answer_len - 1, block_size - 1, VOCAB, generator=generator)  # [T-1, B-1, V]
        knows = torch.rand(answer_len - 1, block_size - 1, generator=generator) < skill
        for s in range(answer_len - 1):
            for j, truth in enumerate(self.answer[s + 1 : s + block_size]):
                self.table[s, j, truth] += knows[s, j]
        self.elsewhere = torch.rand(block_size - 1, VOCAB, generator=generator)

    def __call__(self, tokens: list[int]) -> torch.Tensor:
        said = tokens[len(PROMPT) :]
        on_path = said == self.answer[: len(said)] and len(said) < len(self.answer)
        return self.table[len(said) - 1] if on_path else self.elsewhere

    def target(self, tokens: list[int]) -> torch.Tensor:
        """The answer, whatever was said; token 0 after it."""
        truth = [*PROMPT, *self.answer]
        following = [truth[i + 1] if i + 1 < len(truth) else 0 for i in range(len(tokens))]
        return torch.nn.functional.one_hot(torch.tensor(following), VOCAB).float()

    def drafts(self, *, ranks: int) -> AnswerDrafts:
        return AnswerDrafts(np.array(self.answer), self.table.topk(ranks).indices.numpy())

    def generate(
        self, mode: str, *, coverage: int = 1, fanout: int = 1, by_length: bool = False
    ) -> Generation:
        method = Method(self.target, self, mode=mode, coverage=coverage, fanout=fanout)  # type: ignore[arg-type]
        limit, eos = (len(self.answer), frozenset()) if by_length else (1000, frozenset({END}))
        generation = method.generate(PROMPT, limit, eos_ids=eos)
        assert generation.output_ids == self.answer
        return generation


def as_walk(rounds: list[Round], *, answer_len: int) -> list[WalkRound]:
    """The reference's rounds, with anchors counted up and acceptance cut at the end of the answer."""
    walk, anchor = [], 1
    for done in rounds:
        walk.append(WalkRound(anchor, done.prop_len, min(done.accept_len, answer_len - anchor), done.origin))
        anchor += done.accept_len + 1
    return walk


drafters = st.builds(
    ScriptedDrafter,
    answer_len=st.integers(2, 60),
    block_size=st.integers(2, 7),
    skill=st.sampled_from([0.0, 0.5, 0.8, 0.95, 1.0]),
    seed=st.integers(0, 10_000),
)


@given(drafters, st.booleans())
@settings(max_examples=80)
def test_sync_walk_is_the_references(drafter: ScriptedDrafter, by_length: bool) -> None:
    generation = drafter.generate("sync", by_length=by_length)
    walk = sync_walk(drafter.drafts(ranks=1))
    assert walk == as_walk(generation.rounds, answer_len=len(drafter.answer))
    counts = WalkCounts.of(walk, answer_len=len(drafter.answer), block_size=drafter.table.shape[1] + 1)
    assert counts.tau == generation.tau
    assert counts.hit_rate in (0, None)


@pytest.mark.parametrize("fanout", [1, 2, 5])
@pytest.mark.parametrize("coverage", [1, 2, 3, 7])
@given(drafter=drafters)
@settings(max_examples=25)
def test_async_walk_is_the_references(drafter: ScriptedDrafter, coverage: int, fanout: int) -> None:
    block_size = drafter.table.shape[1] + 1
    coverage = min(coverage, block_size)
    generation = drafter.generate("async", coverage=coverage, fanout=fanout)
    walk = async_walk(drafter.drafts(ranks=6), coverage=coverage, fanout=fanout)
    assert walk == as_walk(generation.rounds, answer_len=len(drafter.answer))
    counts = WalkCounts.of(walk, answer_len=len(drafter.answer), block_size=block_size)
    assert counts.tau == generation.tau
    later = [done.origin != "redraft" for done in generation.rounds[1:]]
    assert counts.hit_rate == (sum(later) / len(later) if later else None)


def test_every_kind_of_round_occurs() -> None:
    """What the comparisons above would miss if drafters were always wrong or always right."""
    drafter = ScriptedDrafter(answer_len=400, block_size=4, skill=0.8, seed=0)
    walk = async_walk(drafter.drafts(ranks=3), coverage=3, fanout=2)
    assert {walked.origin for walked in walk} == set(ORIGINS)
    assert {(walked.prop_len, walked.accept_len) for walked in walk} == {
        (prop_len, accepted) for prop_len in (2, 3) for accepted in range(prop_len + 1)
    }


# By hand: B = 4, the answer 5 6 7 8 9 0 1 2


def by_hand() -> AnswerDrafts:
    """Anchor 1 drafts two right and one wrong (the truth second), anchor 4 all right, the others nothing."""
    answer = np.array([5, 6, 7, 8, 9, 0, 1, 2])
    ranked = np.full((7, 3, 2), 11)
    ranked[0, :, 0] = [6, 7, 10]
    ranked[0, 2, 1] = 8
    ranked[3, :, 0] = [9, 0, 1]
    return AnswerDrafts(answer, ranked)


def test_counts_by_hand() -> None:
    """Rounds: 6 7 stand and 8 follows; 9 0 1 stand and 2 ends it."""
    walk = sync_walk(by_hand())
    assert walk == [WalkRound(1, 3, 2, "redraft"), WalkRound(4, 3, 3, "redraft")]
    counts = WalkCounts.of(walk, answer_len=8, block_size=4)
    assert (counts.num_answers, counts.num_tokens, counts.num_rounds, counts.tau) == (1, 7, 2, 3.5)
    assert counts.accept_histogram == (0, 0, 1, 1)
    assert (counts.reached, counts.accepted) == ((2, 2, 2), (2, 2, 1))
    assert counts.position_acceptance == (1.0, 1.0, 0.5)
    assert (counts.origins, counts.hit_rate) == ((2, 0, 0), 0.0)


@pytest.mark.parametrize(("coverage", "hit_rate"), [(1, 0.0), (3, 0.0), (4, 1.0)])
def test_a_rejection_is_a_hit_within_coverage(coverage: int, hit_rate: float) -> None:
    """The third candidate is rejected: the last of the C-1 positions that a coverage of 4 has."""
    acceptance = Acceptance.of(by_hand(), coverage=coverage, fanout=1)
    assert (acceptance.hit_rate, acceptance.tau) == (hit_rate, 3.5)


def test_candidates_past_the_end_count_neither_way() -> None:
    """Three candidates after anchor 2 of 3 tokens: only the first can be verified."""
    drafts = AnswerDrafts(np.array([1, 2, 3]), np.array([[[9], [9], [9]], [[3], [9], [9]]]))
    counts = WalkCounts.of(sync_walk(drafts), answer_len=3, block_size=4)
    assert counts.accept_histogram == (1, 1, 0, 0)
    assert (counts.reached, counts.accepted) == ((2, 0, 0), (1, 0, 0))
    assert counts.position_acceptance == (0.5, None, None)


def test_counts_pool_over_answers() -> None:
    one = Acceptance.of(by_hand(), coverage=4, fanout=1)
    short = Acceptance.of(AnswerDrafts(np.array([1, 2]), np.full((1, 3, 2), 9)), coverage=4, fanout=1)
    pooled = sum([one, short], start=Acceptance.none(block_size=4, coverage=4, fanout=1))
    assert (pooled.sync.num_answers, pooled.sync.num_tokens, pooled.sync.num_rounds) == (2, 8, 3)
    assert pooled.tau == 8 / 3
    assert pooled.hit_rate == 1.0  # one outcome in all, and it was prepared
    assert pooled.to_dict()["sync"]["accept_histogram"] == [1, 0, 1, 1]
    assert pooled.to_dict()["async"]["origins"] == {"redraft": 2, "hit": 1, "full": 0}


def test_nothing_walked_has_no_tau() -> None:
    empty = Acceptance.none(block_size=3, coverage=2, fanout=1)
    assert (empty.tau, empty.hit_rate) == (None, None)


@pytest.mark.parametrize(
    ("coverage", "fanout", "message"),
    [
        (0, 1, "coverage is 0, allowed are 1 to the block size 4"),
        (5, 1, "coverage is 5"),
        (2, 0, "fanout is 0, allowed with 2 ranked ids are 1 to 1"),
        (2, 2, "fanout is 2"),
    ],
)
def test_wrong_branch_sets_are_refused(coverage: int, fanout: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        async_walk(by_hand(), coverage=coverage, fanout=fanout)


@pytest.mark.parametrize(
    ("answer_len", "shape"), [(1, (0, 3, 1)), (4, (4, 3, 1)), (4, (3, 3)), (4, (3, 0, 1)), (4, (3, 3, 0))]
)
def test_wrong_shapes_are_refused(answer_len: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="has shape"):
        AnswerDrafts(np.zeros(answer_len, int), np.zeros(shape, int))
