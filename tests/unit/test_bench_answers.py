"""What the identity bench calls the same, a tie, a mismatch; and that stored answers are the right ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.answers import TIE_GAP, Answer, AnswerStore, TopTwo, compare

NEAR, FAR = TIE_GAP / 2, TIE_GAP * 2


def answer(output_ids: tuple[int, ...], top_two: tuple[TopTwo, ...] = ()) -> Answer:
    return Answer("q", (5, 6), output_ids, top_two=top_two, accept_histogram=())


def plain(*gaps: float) -> Answer:
    """Output 10, 11, 12, ...; the second choice at each position is the token + 100."""
    ids = tuple(range(10, 10 + len(gaps)))
    top_two = tuple(((-0.5, token), (-0.5 - gap, token + 100)) for token, gap in zip(ids, gaps, strict=True))
    return answer(ids, top_two)


def test_identical() -> None:
    comparison = compare(plain(NEAR, NEAR), answer((10, 11)))
    assert comparison.identical and not comparison.excused


def test_tie_is_excused_at_the_first_difference_only() -> None:
    comparison = compare(plain(FAR, NEAR, FAR), answer((10, 111, 77)))
    assert (comparison.position, comparison.identical, comparison.excused) == (1, False, True)
    assert comparison.gap == pytest.approx(NEAR)


def test_tie_elsewhere_excuses_nothing() -> None:
    comparison = compare(plain(NEAR, FAR, NEAR), answer((10, 111, 112)))
    assert comparison.position == 1 and not comparison.excused


def test_third_token_is_no_tie() -> None:
    comparison = compare(plain(NEAR, NEAR), answer((10, 99)))
    assert comparison.position == 1 and comparison.gap is None and not comparison.excused


@pytest.mark.parametrize("output_ids", [(10,), (10, 11, 12)])
def test_other_length_is_no_tie(output_ids: tuple[int, ...]) -> None:
    comparison = compare(plain(NEAR, NEAR), answer(output_ids))
    assert not comparison.identical and not comparison.excused


def test_answers_to_different_prompts_are_not_compared() -> None:
    with pytest.raises(AssertionError, match="different questions"):
        compare(plain(FAR), replace(answer((10,)), prompt_ids=(5, 7)))


def test_store_returns_what_was_added(tmp_path: Path) -> None:
    stored, later = plain(NEAR, FAR), plain(FAR, FAR)
    AnswerStore(tmp_path / "runs").add(stored)
    assert AnswerStore(tmp_path / "runs").get(stored.question) == stored
    AnswerStore(tmp_path / "runs").add(later)
    assert AnswerStore(tmp_path / "runs").get(stored.question) == later


def test_store_has_no_answer_to_another_prompt_of_that_name(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    store.add(plain(FAR))
    assert store.get(replace(plain(FAR).question, prompt_ids=(5, 7))) is None
    assert store.get(replace(plain(FAR).question, name="r")) is None
