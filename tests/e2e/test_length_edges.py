"""A drafter of fewer positions than the target, and the end of the context."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.asking import Reply, RunningServer, rounds_of, same_reply, same_tokens
from tests.e2e.cases import EDGES, IDENTITY, SHORT_READ, TO_THE_END
from tests.e2e.conftest import BLOCK_SIZE, SHORT_CONTEXT, SHORT_POSITIONS
from tests.e2e.expected import Cacheless

pytestmark = pytest.mark.parametrize("server", ["short"], indirect=True)


def test_a_prompt_in_chunks_is_drafted_as_one_in_one_piece(
    server: RunningServer, plain: dict[str, Reply], cacheless: Cacheless
) -> None:
    before = len(server.rounds())
    reply = server.ask(SHORT_READ)
    assert reply.meta["cached_tokens"] == 0
    if not same_reply(plain[SHORT_READ.name], reply):
        return
    rounds = rounds_of(reply, server.rounds()[before:])
    assert all(one.prop_len == BLOCK_SIZE - 1 for one in rounds)
    cacheless.assert_drafted(reply, rounds)


def test_answers_across_the_edge_are_plain(server: RunningServer, plain: dict[str, Reply]) -> None:
    for case in EDGES:
        before = len(server.rounds())
        reply = server.ask(case)
        same_reply(plain[case.name], reply)
        assert reply.meta["spec_accept_length"] >= 1
        # A block is drafted exactly where the drafter has positions for all of it.
        for one in rounds_of(reply, server.rounds()[before:]):
            fits = max(one.committed_len, len(case.prompt_ids)) + BLOCK_SIZE <= SHORT_POSITIONS
            assert one.prop_len == (BLOCK_SIZE - 1) * fits, f"{case}: {one}"


def test_rows_beyond_and_within_the_edge_in_one_batch(server: RunningServer, plain: dict[str, Reply]) -> None:
    for reply in server.ask_together((*EDGES, *IDENTITY[:4]), at_once=8):
        same_reply(plain[reply.case.name], reply)


def test_the_log_says_so_once(server: RunningServer) -> None:
    server.ask(EDGES[1])
    server.ask(EDGES[1])
    assert server.log().count("decodes without drafts (too_long)") == 1
    assert server.state()["fallbacks"]["too_long"] >= 2


def test_an_answer_may_end_with_the_context(server: RunningServer, plain: dict[str, Reply]) -> None:
    assert len(TO_THE_END.prompt_ids) + TO_THE_END.max_new_tokens == SHORT_CONTEXT
    reply = server.ask(TO_THE_END)
    # SGLang keeps the last places of a context free.
    assert TO_THE_END.max_new_tokens - 2 <= len(reply.output_ids) <= TO_THE_END.max_new_tokens
    assert reply.ended_by == "length"
    same_tokens(plain[TO_THE_END.name].cut(len(reply.output_ids)), reply)


@pytest.mark.parametrize(
    ("num_prompt", "num_new"),
    [(SHORT_CONTEXT + 80, 8), (SHORT_CONTEXT, 8), (SHORT_CONTEXT - 8, 9)],
)
def test_a_request_longer_than_the_context_is_refused_and_the_server_lives(
    server: RunningServer, plain: dict[str, Reply], num_prompt: int, num_new: int
) -> None:
    ids = [1000 + i for i in range(num_prompt)]
    with pytest.raises(httpx.HTTPStatusError) as error:
        server.process.generate(ids, sampling={"temperature": 0, "max_new_tokens": num_new})
    assert error.value.response.status_code == 400
    assert str(SHORT_CONTEXT) in error.value.response.text and "context length" in error.value.response.text
    same_reply(plain[IDENTITY[0].name], server.ask(IDENTITY[0]))
