"""With the scripted drafter the server, the script and `reference.py` agree round by round, in both modes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.identity_counts import Counts, outcomes
from d3d_sglang.reference import LogitsOf, Method, target_logits
from tests.e2e.asking import Reply, RunningServer, rounds_of, same_reply, same_tokens
from tests.e2e.cases import ALL_OUTCOMES, CHUNKED, END_ID, IDENTITY, Case, tokenizer
from tests.e2e.conftest import BLOCK_SIZE, COVERAGE, FANOUT
from tests.e2e.expected import scripted_candidates
from tests.e2e.scripted.logits import scripted_logits
from tests.e2e.scripted.round_log import LoggedRound
from tests.e2e.scripted.script import Outcome, Script

pytestmark = pytest.mark.parametrize("server", ["scripted", "ahead"], indirect=True)
MODES: dict[str, Literal["sync", "async"]] = {"scripted": "sync", "ahead": "async"}


@pytest.fixture(scope="module")
def target(model: Path) -> LogitsOf:
    """The end-to-end model as `reference.py` wants it."""
    return target_logits(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())


def script_of(server: RunningServer) -> Script:
    assert server.script is not None
    return server.script


@pytest.mark.parametrize("case", IDENTITY, ids=str)
def test_rounds_are_those_of_the_reference(
    server: RunningServer, plain: dict[str, Reply], target: LogitsOf, case: Case
) -> None:
    before = len(server.rounds())
    reply = server.ask(case)
    if not same_tokens(plain[case.name], reply):
        return
    script = script_of(server)
    scene = script.find(case.prompt_ids)
    assert scene is not None
    draft = scripted_logits(script, scene, block_size=BLOCK_SIZE, vocab_size=len(tokenizer()))
    method = Method(target, draft, mode=MODES[server.name], coverage=COVERAGE, fanout=FANOUT)
    reference = method.generate(list(case.prompt_ids), case.max_new_tokens, eos_ids=frozenset({END_ID}))
    assert reply.output_ids == reference.output_ids
    ours = [
        (one.origin, one.block[0], one.block[1 : 1 + one.prop_len], one.accept_len)
        for one in rounds_of(reply, server.rounds()[before:])
    ]
    assert ours == [(one.origin, one.anchor, one.draft, one.accept_len) for one in reference.rounds]


def scripted_outcomes(server: RunningServer, case: Case) -> list[Outcome]:
    """The rounds of a request that is alone, by the script; none if the answer ends in the first one."""
    scene = script_of(server).find(case.prompt_ids)
    assert scene is not None
    grid = {"coverage": COVERAGE, "fanout": FANOUT} if MODES[server.name] == "async" else {}
    alone = Script((scene,), script_of(server).seed)
    return alone.outcomes(block_size=BLOCK_SIZE, **{"coverage": 0, "fanout": 0, **grid})


def test_everything_occurs_and_rows_of_a_batch_do_as_they_would_alone(
    server: RunningServer, plain: dict[str, Reply]
) -> None:
    before = len(server.rounds())
    replies = server.ask_together(ALL_OUTCOMES, at_once=16)
    logged = server.rounds()[before:]
    accept_lens, counts = set(), Counts()
    for reply in replies:
        if not same_tokens(plain[reply.case.name], reply):
            continue
        rounds = rounds_of(reply, logged)
        accept_lens |= {one.accept_len for one in rounds}
        counts += outcomes(rounds)
        as_scripted(server, rounds)
        # The script does not tell how a round ends that is cut short by the end of the answer.
        whole, foreseen = rounds[:-1], scripted_outcomes(server, reply.case)
        ours = [(one.origin, one.prop_len, one.accept_len) for one in whole]
        expected = [(one.origin, one.prop_len, one.accept_len) for one in foreseen]
        assert ours == expected[: len(ours)], f"{reply.case}"
    if MODES[server.name] == "sync":
        assert accept_lens == set(range(BLOCK_SIZE))
    else:
        assert set(counts.hits) == set(range(COVERAGE - 1))
        assert set(counts.misses) == set(range(BLOCK_SIZE - 1))
        assert set(counts.fulls) == {BLOCK_SIZE - 2, BLOCK_SIZE - 1}


def as_scripted(server: RunningServer, rounds: Sequence[LoggedRound]) -> None:
    """Every round proposes what the script says for its place in the answer."""
    for one in rounds:
        assert one.prop_len == BLOCK_SIZE - 1 - (one.origin == "full")
        expected = scripted_candidates(script_of(server), one)
        assert one.block[1 : 1 + one.prop_len] == expected[: one.prop_len], f"{one}"


def test_a_prompt_in_chunks_is_drafted_and_verified_as_one_in_one_piece(
    server: RunningServer, plain: dict[str, Reply]
) -> None:
    """The plain server read the prompt in one piece, and so did the script."""
    server.process.flush_cache()
    before = len(server.rounds())
    reply = server.ask(CHUNKED)
    assert reply.meta["prompt_tokens"] >= 1000 and reply.meta["cached_tokens"] == 0
    assert len(plain[CHUNKED.name].output_ids) == CHUNKED.max_new_tokens
    if not same_reply(plain[CHUNKED.name], reply):
        return
    rounds = rounds_of(reply, server.rounds()[before:])
    as_scripted(server, rounds)
    # The histogram of a prompt in one piece; the last round may be cut short by the end.
    expected = [one.accept_len for one in scripted_outcomes(server, CHUNKED)]
    assert [one.accept_len for one in rounds[:-1]] == expected[: len(rounds) - 1]
    assert max(reply.histogram[1:], default=0) > 0
