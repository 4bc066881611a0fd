"""The scripted drafter does what tests rely on: one seeded error a block, everything else right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.scripted.script import FILLER, Script

BLOCK_SIZE = 4
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


def test_past_its_end_the_script_proposes_filler() -> None:
    last = len(PROMPT) + len(ANSWER) - 1
    for committed_len in (last - 1, last, last + 5):
        error = SCRIPT.error_position(SCRIPT.scenes[0], committed_len, block_size=BLOCK_SIZE)
        expected = [ANSWER[-1] if committed_len < last else FILLER, FILLER, FILLER]
        found = candidates(committed_len)
        assert [i for i in range(3) if found[i] != expected[i]] == ([error] if error < 3 else [])


def test_unknown_prompt_gets_filler() -> None:
    assert SCRIPT.candidates(None, 12, block_size=BLOCK_SIZE) == [FILLER] * (BLOCK_SIZE - 1)


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


def test_seed_with_which_every_accept_length_occurs() -> None:
    script = SCRIPT.seeded_for_all_lengths(block_size=BLOCK_SIZE)
    assert set(script.accept_lengths(block_size=BLOCK_SIZE)) == set(range(BLOCK_SIZE))
    with pytest.raises(ValueError, match="too short"):
        Script.of([(PROMPT, ANSWER[:5])]).seeded_for_all_lengths(block_size=BLOCK_SIZE, tries=20)
