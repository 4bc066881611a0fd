"""The scripted drafter does what tests rely on: one seeded error a block, everything else right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.scripted.script import FILLER, NO_ERROR, RANKS, Outcome, Script

BLOCK_SIZE = 4
SUPPORT = 5
PROMPT = [7, 8, 9]
ANSWER = list(range(20, 60))
SCRIPT = Script.of([(PROMPT, ANSWER), ([7, 8], [50, 51, 52])])


def candidates(committed_len: int) -> list[int]:
    return SCRIPT.candidates(SCRIPT.scenes[0], committed_len, block_size=BLOCK_SIZE)


def test_first_mismatch_is_the_error_position() -> None:
    tokens = [*PROMPT, *ANSWER]
    seen: Counter[int] = Counter()
    for committed_len in range(len(PROMPT), len(tokens) - BLOCK_SIZE):
        truth = tokens[committed_len + 1 : committed_len + BLOCK_SIZE]
        wrong = [i for i, (a, b) in enumerate(zip(candidates(committed_len), truth, strict=True)) if a != b]
        error = SCRIPT.error_position(SCRIPT.scenes[0], committed_len, block_size=BLOCK_SIZE)
        assert wrong == ([error] if error < BLOCK_SIZE - 1 else [])
        seen[error] += 1
    assert set(seen) == set(range(BLOCK_SIZE))


def test_shares_of_blocks_without_error_and_of_ranks() -> None:
    """Within four standard deviations of 2,000 draws."""
    script = Script.of([(PROMPT, list(range(2_000)))])
    scene = script.scenes[0]
    errors = [script.error_position(scene, n, block_size=BLOCK_SIZE) for n in range(2_000)]
    ranks = [script.error_rank(scene, n) for n in range(2_000)]
    shares = {BLOCK_SIZE - 1: NO_ERROR} | {i: (1 - NO_ERROR) / 3 for i in range(BLOCK_SIZE - 1)}
    for position, share in shares.items():
        assert abs(errors.count(position) - 2_000 * share) < 4 * (2_000 * share * (1 - share)) ** 0.5
    for rank in set(RANKS):
        share = RANKS.count(rank) / len(RANKS)
        assert abs(ranks.count(rank) - 2_000 * share) < 4 * (2_000 * share * (1 - share)) ** 0.5


def test_likely_tokens_are_distinct_and_the_right_one_has_its_rank() -> None:
    tokens = [*PROMPT, *ANSWER]
    scene = SCRIPT.scenes[0]
    for committed_len in range(len(PROMPT), len(tokens) - BLOCK_SIZE):
        ranked = SCRIPT.ranked(
            scene, committed_len, anchor=tokens[committed_len], block_size=BLOCK_SIZE, support=SUPPORT
        )
        assert [ranks[0] for ranks in ranked] == candidates(committed_len)
        error = SCRIPT.error_position(scene, committed_len, block_size=BLOCK_SIZE)
        rank = SCRIPT.error_rank(scene, committed_len)
        for i, (ranks, right) in enumerate(zip(ranked, tokens[committed_len + 1 :], strict=False)):
            assert len(set(ranks)) == SUPPORT and min(ranks) >= 0
            if i != error:
                assert ranks[0] == right
            elif rank:
                assert ranks.index(right) == rank
            else:
                assert right not in ranks


def test_after_another_anchor_the_continuation_has_another_error() -> None:
    scene, errors = SCRIPT.scenes[0], set()
    for place in range(4, 30):
        committed_len, right = len(PROMPT) + place, ANSWER[place + 1 : place + BLOCK_SIZE]
        ranked = SCRIPT.ranked(
            scene, committed_len, anchor=ANSWER[place] + 1, block_size=BLOCK_SIZE, support=SUPPORT
        )
        wrong = [i for i, ranks in enumerate(ranked) if ranks[0] != right[i]]
        assert len(wrong) <= 1 and all(len(set(ranks)) == SUPPORT for ranks in ranked)
        errors.add((SCRIPT.error_position(scene, committed_len, block_size=BLOCK_SIZE), *wrong))
    assert len(errors) > BLOCK_SIZE, "the errors are those after the script's own anchor"


def test_past_its_end_the_script_proposes_filler() -> None:
    last = len(PROMPT) + len(ANSWER) - 1
    for committed_len in (last - 1, last, last + 5):
        error = SCRIPT.error_position(SCRIPT.scenes[0], committed_len, block_size=BLOCK_SIZE)
        expected = [ANSWER[-1] if committed_len < last else FILLER, FILLER, FILLER]
        found = candidates(committed_len)
        assert [i for i in range(3) if found[i] != expected[i]] == ([error] if error < 3 else [])


def test_unknown_prompt_gets_filler() -> None:
    assert SCRIPT.candidates(None, 12, block_size=BLOCK_SIZE) == [FILLER] * (BLOCK_SIZE - 1)
    ranked = SCRIPT.ranked(None, 12, anchor=5, block_size=BLOCK_SIZE, support=SUPPORT)
    assert [ranks[0] for ranks in ranked] == [FILLER] * (BLOCK_SIZE - 1)
    assert all(len(set(ranks)) == SUPPORT for ranks in ranked)


@pytest.mark.parametrize(
    ("token_ids", "number"),
    [(PROMPT, 0), ([*PROMPT, *ANSWER[:5]], 0), ([7, 8], 1), ([7, 8, 50], 1), ([7], None), ([7, 8, 51], None)],
)
def test_find(token_ids: list[int], number: int | None) -> None:
    scene = SCRIPT.find(token_ids)
    assert (scene.number if scene else None) == number


def test_stored_script_drafts_the_same(tmp_path: Path) -> None:
    SCRIPT.with_seed(3).save(tmp_path / "script.json")
    assert Script.load(tmp_path / "script.json") == SCRIPT.with_seed(3) != SCRIPT


def test_outcomes_follow_one_another() -> None:
    """Each round starts where the one before ended, from what that one led to."""
    coverage, fanout = 3, 1
    script = Script.of([(PROMPT, list(range(20, 400)))])
    scene = script.scenes[0]
    committed_len, origin = len(PROMPT), "redraft"
    outcomes = script.outcomes(block_size=BLOCK_SIZE, coverage=coverage, fanout=fanout)
    for done in outcomes:
        ahead = 1 if origin == "full" else 0
        assert (done.origin, done.prop_len) == (origin, BLOCK_SIZE - 1 - ahead)
        drafted = script.candidates(scene, committed_len - ahead, block_size=BLOCK_SIZE)[ahead:]
        right = scene.token_ids[committed_len + 1 :]
        wrong = [i for i, token in enumerate(drafted) if token != right[i]]
        assert done.accept_len == (wrong[0] if wrong else done.prop_len)
        if done.leads_to == "hit":
            assert done.accept_len < min(done.prop_len, coverage - 1)
            assert script.error_rank(scene, committed_len - ahead) == 1
        committed_len += done.accept_len + 1
        if done.leads_to == "full":
            assert (
                script.candidates(scene, committed_len - 1, block_size=BLOCK_SIZE)[0]
                == right[done.accept_len]
            )
        origin = done.leads_to if done.leads_to in ("hit", "full") else "redraft"
    assert len(scene.token_ids) - BLOCK_SIZE <= committed_len + 1
    assert {done.leads_to for done in outcomes} == {"hit", "miss", "full", "lost"}


def test_synchronous_outcomes_are_all_drafted_on_demand() -> None:
    outcomes = SCRIPT.outcomes(block_size=BLOCK_SIZE, coverage=0, fanout=0)
    assert {done.origin for done in outcomes} == {"redraft"}
    assert {done.leads_to for done in outcomes} <= {"miss", "lost"}


def test_seed_with_which_every_outcome_occurs() -> None:
    long = Script.of([(PROMPT, list(range(20, 400)))])
    script = long.seeded_for_all_outcomes(block_size=BLOCK_SIZE, coverage=3, fanout=1)
    outcomes = script.outcomes(block_size=BLOCK_SIZE, coverage=3, fanout=1)
    assert {done.accept_len for done in outcomes if done.leads_to == "hit"} == {0, 1}
    assert {done.accept_len for done in outcomes if done.leads_to == "miss"} == {0, 1, 2}
    assert {done.prop_len for done in outcomes if done.leads_to == "full"} == {2, 3}
    assert Outcome("full", 2, 2, "full") in outcomes
    with pytest.raises(ValueError, match="too short"):
        SCRIPT.seeded_for_all_outcomes(block_size=16, coverage=12, fanout=2, tries=20)
