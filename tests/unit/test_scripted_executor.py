"""The scripted drafter of the end-to-end tests serves both modes, and its script says what happens.

The target answers as scripted. Rounds are then known in three ways: by the drafting side, by `reference.py`,
and by the script alone.

Legend: B block size, C coverage, F fanout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.functional import one_hot

from d3d_sglang.drafter.kv_cache import CacheShape, PagedCache
from d3d_sglang.reference import LogitsOf
from tests.e2e.scripted.executor import ScriptedExecutor, ScriptedModel
from tests.e2e.scripted.logits import SUPPORT, scripted_logits
from tests.e2e.scripted.script import FILLER, Scene, Script
from tests.unit.drafting_session import NUM_PAGES, NUM_ROWS, PAGE_SIZE, DraftingSession, prompt

VOCAB_SIZE = 60
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Scripted:
    """Target and drafter of one scene."""

    script: Script
    scene: Scene

    @property
    def target(self) -> LogitsOf:
        """It says the next token of the scene, whatever was said before."""

        def logits(tokens: list[int]) -> torch.Tensor:
            following = [*self.scene.token_ids[1:], *[FILLER] * len(tokens)][: len(tokens)]
            return one_hot(torch.tensor(following), VOCAB_SIZE).float()

        return logits

    def logits(self, block_size: int) -> Any:
        return scripted_logits(self.script, self.scene, block_size=block_size, vocab_size=VOCAB_SIZE)

    def executor(self, block_size: int) -> ScriptedExecutor:
        shape = CacheShape(
            num_layers=1,
            num_rows=NUM_ROWS,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            max_length=500,
            num_kv_heads=1,
            head_dim=1,
            dtype=torch.float32,
        )
        return ScriptedExecutor(
            ScriptedModel(CPU),
            PagedCache(shape, CPU),
            script=self.script,
            block_size=block_size,
            mask_token_id=0,
            support=SUPPORT,
        )


def scripted(length: int, *, block_size: int, coverage: int, fanout: int) -> Scripted:
    answer = [20 + token for token in prompt(length, seed=1)]
    script = Script.of([([30, 31, 32], [25]), (prompt(9, seed=0), answer)])
    if coverage:
        script = script.seeded_for_all_outcomes(block_size=block_size, coverage=coverage, fanout=fanout)
    return Scripted(script, script.scenes[1])


def decoded(source: Scripted, **options: Any) -> DraftingSession:
    session = DraftingSession(source, **options)
    session.start(2, source.scene.prompt_ids)
    while len(session.tokens[2]) < len(source.scene.token_ids) - session.block_size:
        session.round(2)
    assert session.rows.executor.scene_number(2) == source.scene.number
    return session


@pytest.mark.parametrize(("mode", "coverage"), [("sync", 0), ("async", 3)])
def test_rounds_are_those_of_the_reference_and_of_the_script(mode: Any, coverage: int) -> None:
    source = scripted(300, block_size=4, coverage=coverage, fanout=1)
    session = decoded(source, mode=mode, block_size=4, coverage=max(coverage, 1), fanout=1)
    session.assert_reference(2)
    expected = source.script.outcomes(block_size=4, coverage=coverage, fanout=1)
    ours = [(done.origin, done.prop_len, done.accept_len) for done in session.rounds[2]]
    assert ours == [(done.origin, done.prop_len, done.accept_len) for done in expected][: len(ours)]
    origins = {origin for origin, _, _ in ours}
    assert origins == ({"redraft"} if mode == "sync" else {"redraft", "hit", "full"})


def test_the_papers_grid_meets_everything() -> None:
    source = scripted(3000, block_size=16, coverage=12, fanout=2)
    outcomes = source.script.outcomes(block_size=16, coverage=12, fanout=2)
    assert {done.accept_len for done in outcomes if done.leads_to == "hit"} == set(range(11))
    assert {done.accept_len for done in outcomes if done.leads_to == "miss"} == set(range(15))
    assert {done.prop_len for done in outcomes if done.leads_to == "full"} == {14, 15}


def test_after_a_miss_siblings_of_every_kind_are_verified() -> None:
    source = scripted(400, block_size=4, coverage=3, fanout=1)
    session = decoded(source, block_size=4, coverage=3, fanout=1, sibling=True)
    siblings = [done for done in session.rounds[2] if done.origin == "sibling"]
    assert {done.prop_len for done in siblings} == {0, 2, 3}
    assert {done.accept_len > 0 for done in siblings} == {False, True}
    assert session.output(2) == list(source.scene.continuation_ids[: len(session.output(2))])
    assert {done.origin for done in session.rounds[2]} == {"redraft", "hit", "full", "sibling"}


def test_a_scene_is_known_when_its_prompt_is_read_from_pages() -> None:
    source = scripted(40, block_size=4, coverage=0, fanout=1)
    session = DraftingSession(source, block_size=4)
    session.start(2, source.scene.prompt_ids)
    session.start(3, source.scene.prompt_ids)
    assert session.rows.pool.stats().shared_tokens == 8
    for _ in range(4):
        session.round(2, 3)
    assert session.rows.executor.scene_number(3) == source.scene.number
    assert session.rounds[2] == session.rounds[3]
    session.start(4, [1, 2, 3])
    assert session.rows.executor.scene_number(4) is None
