"""Requests that are taken back in the middle and return, on pages of 16 tokens."""

from __future__ import annotations

import pytest

from tests.e2e.asking import Reply, RunningServer, same_reply
from tests.e2e.cases import GRAMMARS, IDENTITY, MINIMA, PENALTIES

pytestmark = pytest.mark.parametrize("server", ["retracting"], indirect=True)


def retractions(server: RunningServer) -> int:
    return server.log().count("Testing retraction. #retracted_reqs: 1")


def test_answers_are_plain(server: RunningServer, plain: dict[str, Reply]) -> None:
    before = retractions(server)
    replies = server.ask_together(IDENTITY, at_once=8)
    for reply in replies:
        same_reply(plain[reply.case.name], reply)
    assert retractions(server) - before >= 4
    # Drafting goes on after a retraction: rounds beyond those of a request that is drafted once and no more.
    accepted = sum(k * count for reply in replies for k, count in enumerate(reply.histogram))
    assert accepted > sum(len(reply.output_ids) for reply in replies) / 2


def test_penalties_and_grammars_survive(server: RunningServer, plain: dict[str, Reply]) -> None:
    before = retractions(server)
    cases = (*PENALTIES, *MINIMA, *GRAMMARS, *IDENTITY[:2])
    for reply in server.ask_together(cases, at_once=12):
        same_reply(plain[reply.case.name], reply)
    assert retractions(server) - before >= 4


def test_the_prefix_cache_works_in_pages(server: RunningServer, plain: dict[str, Reply]) -> None:
    case = IDENTITY[1]
    server.process.flush_cache()
    server.ask(case)
    warm = server.ask(case)
    assert warm.meta["cached_tokens"] == len(case.prompt_ids) // 16 * 16 > 0
    same_reply(plain[case.name], warm)
