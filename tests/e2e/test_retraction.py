"""Requests that are taken back in the middle and return, on pages of 16 tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from d3d_sglang.integration.drafter_setup import PAGE_SIZE
from tests.e2e.asking import Reply, RunningServer, same_drafts, same_reply
from tests.e2e.cases import ESSAYS, GRAMMARS, IDENTITY, LONG, LONG_WITH_SUFFIX, MINIMA, PENALTIES, Case
from tests.e2e.conftest import BLOCK_SIZE
from tests.e2e.expected import scripted_candidates

pytestmark = pytest.mark.parametrize("server", ["retracting"], indirect=True)

# A script is so good that short answers soon end.
CASES = (*IDENTITY[:5], *ESSAYS)
# Tokens a request has when it is taken back, which the drafter has not been told yet: under overlap the
# host hears of a round when the next one has begun.
UNTOLD = 2 * BLOCK_SIZE


def retractions(server: RunningServer) -> int:
    return server.log().count("Testing retraction. #retracted_reqs: 1")


def ask_retracting(
    server: RunningServer, plain: dict[str, Reply], cases: Sequence[Case], *, at_least: int = 4
) -> list[Reply]:
    """Ask all at once; every answer is plain, though some requests were taken back."""
    before = retractions(server)
    replies = server.ask_together(cases, at_once=len(cases))
    for reply in replies:
        same_reply(plain[reply.case.name], reply)
    assert retractions(server) - before >= at_least
    return replies


def test_answers_are_plain(server: RunningServer, plain: dict[str, Reply]) -> None:
    replies = ask_retracting(server, plain, CASES)
    # Drafting goes on after a retraction: rounds beyond those of a request that is drafted once and no more.
    accepted = sum(k * count for reply in replies for k, count in enumerate(reply.histogram))
    assert accepted > sum(len(reply.output_ids) for reply in replies) / 2


def test_penalties_and_grammars_survive(server: RunningServer, plain: dict[str, Reply]) -> None:
    cases = (*PENALTIES, *MINIMA, *GRAMMARS, *GRAMMARS, *IDENTITY[:2])
    ask_retracting(server, plain, cases, at_least=2)


def test_a_request_that_returns_is_drafted_as_scripted(
    server: RunningServer, plain: dict[str, Reply]
) -> None:
    before = len(server.rounds())
    ask_retracting(server, plain, CASES)
    assert server.script is not None
    num_returned = 0
    for one in server.rounds()[before:]:
        assert one.scene is not None, f"the drafter does not know what it reads: {one}"
        scene = server.script.scenes[one.scene]
        if one.origin == "sibling" or one.committed_len + 1 >= len(scene.token_ids):
            continue  # the answer had ended then
        assert one.prop_len == BLOCK_SIZE - 1 - (one.origin == "full")
        expected = scripted_candidates(server.script, one)
        assert one.block[1 : 1 + one.prop_len] == expected[: one.prop_len], f"{one}"
        # With siblings a row waits only in its first round, and in the first one after it returned.
        num_returned += one.origin == "redraft" and one.committed_len > len(scene.prompt_ids) + 1
    assert num_returned >= 2
    assert server.state()["fallbacks"] == {}


def test_after_retractions_a_prompt_is_drafted_as_when_it_was_read(
    server: RunningServer, plain: dict[str, Reply]
) -> None:
    """A request that is alone is not taken back."""
    server.process.flush_cache()
    cold = server.ask_logged(LONG)
    server.ask(LONG_WITH_SUFFIX)
    read, taken_back = server.tokens_read(), retractions(server)
    cases = (LONG, LONG_WITH_SUFFIX, *ESSAYS[:2])
    ask_retracting(server, plain, cases)
    # Long prompts are taken back first, and read from their pages again.
    read, taken_back = server.tokens_read() - read, retractions(server) - taken_back
    new = sum(len(case.prompt_ids) for case in ESSAYS[:2])
    assert read <= new + (len(cases) + taken_back) * (PAGE_SIZE + UNTOLD)
    warm = server.ask_logged(LONG)
    assert cold.reply.meta["cached_tokens"] == 0 < warm.reply.meta["cached_tokens"]
    for asked in (cold, warm):
        same_reply(plain[LONG.name], asked.reply)
    assert cold.reply.histogram == warm.reply.histogram
    same_drafts(cold.rounds, warm.rounds)


def test_the_prefix_cache_works_in_pages(server: RunningServer, plain: dict[str, Reply]) -> None:
    case = IDENTITY[1]
    server.process.flush_cache()
    server.ask(case)
    warm = server.ask(case)
    assert warm.meta["cached_tokens"] == len(case.prompt_ids) // 16 * 16 > 0
    same_reply(plain[case.name], warm)
