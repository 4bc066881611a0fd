"""What the drafter of a server proposes is what its network proposes without pages, rows and other blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.e2e.asking import Reply, RunningServer, rounds_of, same_tokens
from tests.e2e.cases import ECHOES, IDENTITY, LONG
from tests.e2e.expected import Cacheless

ON_DRAFTER = pytest.mark.parametrize("server", ["drafter"], indirect=True)

NUM_TOKENS = 8  # about as many rounds, since an untrained drafter's candidates are rarely accepted

# Of the candidates, by 16 other tokens in a prompt of 600; seen: 0.27 and 0.33. Rounds that are compared
# exactly need no more.
SHARE_CHANGED = 0.1


@ON_DRAFTER
def test_candidates_of_a_batch_are_those_of_the_network_alone(
    server: RunningServer, plain: dict[str, Reply], cacheless: Cacheless
) -> None:
    before = len(server.rounds())
    replies = server.ask_together([replace(case, max_new_tokens=NUM_TOKENS) for case in IDENTITY], at_once=8)
    rounds = server.rounds()[before:]
    for reply in replies:
        if same_tokens(plain[reply.case.name].cut(NUM_TOKENS), reply):
            cacheless.assert_drafted(reply, rounds_of(reply, rounds))


@ON_DRAFTER
def test_candidates_after_a_prompt_that_is_read_from_pages(
    server: RunningServer, plain: dict[str, Reply], cacheless: Cacheless
) -> None:
    case = replace(LONG, max_new_tokens=NUM_TOKENS)
    server.process.flush_cache()
    server.ask(case)
    before = len(server.rounds())
    reply = server.ask(case)
    assert reply.meta["cached_tokens"] > 0
    if same_tokens(plain[case.name].cut(NUM_TOKENS), reply):
        cacheless.assert_drafted(reply, rounds_of(reply, server.rounds()[before:]))


def test_candidates_depend_on_tokens_far_back(cacheless: Cacheless) -> None:
    """Otherwise agreement would say nothing about pages."""
    tokens, page = list(LONG.prompt_ids), ECHOES[0].prompt_ids + ECHOES[1].prompt_ids
    drafted = cacheless.logits(tokens).argmax(dim=1)
    for start in (0, len(tokens) // 2):
        other = [*tokens[:start], *page, *tokens[start + len(page) :]]
        different = cacheless.logits(other).argmax(dim=1) != drafted
        assert different.float().mean() > SHARE_CHANGED, f"a page at {start}"
