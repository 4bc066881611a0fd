"""What a request row carries from one request to the next, and between rows of a batch, is nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import httpx
import pytest

from d3d_sglang.integration.drafter_setup import PAGE_SIZE
from tests.e2e.asking import Reply, RunningServer, rounds_of, same_drafts, same_reply, same_tokens
from tests.e2e.cases import ECHOES, IDENTITY, LONG, LONG_WITH_SUFFIX, MASK_IN_PROMPT, MORE, Case

pytestmark = pytest.mark.parametrize("server", ["drafter", "scripted", "ahead"], indirect=True)

NUM_ROUNDS = 6  # about: an untrained drafter's candidates are rarely accepted


def test_a_prompt_from_the_prefix_cache_is_drafted_as_one_that_was_read(
    server: RunningServer, plain: dict[str, Reply]
) -> None:
    """Tau is then the same too, exactly, and the drafter reads at most a page of what it has read before."""
    server.process.flush_cache()
    cold, warm, other = (server.ask_logged(case) for case in (LONG, LONG, LONG_WITH_SUFFIX))
    server.process.flush_cache()
    other_cold, again = (server.ask_logged(case) for case in (LONG_WITH_SUFFIX, LONG))
    num_prompt = len(LONG.prompt_ids)
    assert num_prompt >= 500
    assert cold.reply.meta["cached_tokens"] == other_cold.reply.meta["cached_tokens"] == 0
    assert warm.reply.meta["cached_tokens"] == num_prompt - 1
    for shared in (other, again):
        assert 500 <= shared.reply.meta["cached_tokens"] < num_prompt
    for asked in (cold, warm, other, other_cold, again):
        same_reply(plain[asked.reply.case.name], asked.reply)
    for one, same in ((cold, warm), (cold, again), (other_cold, other)):
        assert one.reply.histogram == same.reply.histogram
        same_drafts(one.rounds, same.rounds)
    assert cold.num_read == num_prompt and other_cold.num_read == len(LONG_WITH_SUFFIX.prompt_ids)
    assert warm.num_read < PAGE_SIZE
    num_shared = common_length(LONG.prompt_ids, LONG_WITH_SUFFIX.prompt_ids)
    for asked in (other, again):
        num_new = len(asked.reply.case.prompt_ids) - num_shared
        assert num_new <= asked.num_read < num_new + PAGE_SIZE


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_a_row_forgets_the_request_it_served_before(server: RunningServer, plain: dict[str, Reply]) -> None:
    short = MORE[0]
    server.process.flush_cache()
    fresh = server.ask_logged(short)
    long = server.ask_logged(LONG)
    after_long = server.ask_logged(short)
    abort_mid_stream(server, IDENTITY[5])
    after_abort = server.ask_logged(short)
    rows = {one.row for asked in (fresh, long, after_long, after_abort) for one in asked.rounds}
    assert len(rows) == 1, "they were to be in one row"
    for asked in (fresh, after_long, after_abort):
        same_reply(plain[short.name], asked.reply)
        same_drafts(fresh.rounds, asked.rounds)


def abort_mid_stream(server: RunningServer, case: Case) -> None:
    """Begin to read a stream, hang up, and wait until the server has noticed."""
    body = {
        "input_ids": case.prompt_ids,
        "sampling_params": case.sampling_params | {"max_new_tokens": 500, "ignore_eos": True},
        "stream": True,
    }
    with httpx.stream("POST", f"{server.process.url}/generate", json=body, timeout=60.0) as response:
        lines = (line for line in response.iter_lines() if line)
        for _ in range(3):
            assert next(lines).startswith("data: {")
    # Refused while a request runs.
    server.process.flush_cache()


def test_rows_of_a_batch_do_not_see_each_other(server: RunningServer, plain: dict[str, Reply]) -> None:
    cases = [replace(case, max_new_tokens=NUM_ROUNDS) for case in (*IDENTITY, *MORE)]
    assert len(cases) == len({case.prompt_ids for case in cases}) == 16
    before = len(server.rounds())
    together = server.ask_together(cases, at_once=16)
    rounds = server.rounds()[before:]
    assert max(sum(one.number == number for one in rounds) for number in {one.number for one in rounds}) > 8
    for reply in together[::4]:  # alone each costs seconds, and a row that sees another shows in any of them
        alone = server.ask_logged(reply.case)
        expected = plain[reply.case.name].cut(NUM_ROUNDS)
        if same_tokens(expected, reply) and same_tokens(expected, alone.reply):
            assert reply.histogram == alone.reply.histogram
            same_drafts(alone.rounds, rounds_of(reply, rounds))


def test_many_tiny_requests(server: RunningServer, plain: dict[str, Reply]) -> None:
    for reply in server.ask_together(ECHOES, at_once=12):
        same_reply(plain[reply.case.name], reply)


def test_the_mask_token_in_a_prompt(server: RunningServer, plain: dict[str, Reply]) -> None:
    same_reply(plain[MASK_IN_PROMPT.name], server.ask(MASK_IN_PROMPT))
