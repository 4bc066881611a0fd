"""With the scripted drafter the server, the script and `reference.py` agree round by round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from d3d_sglang.reference import Method, target_logits
from tests.e2e.asking import Reply, RunningServer, rounds_of, same_reply, same_tokens
from tests.e2e.cases import ALL_LENGTHS, CHUNKED, END_ID, IDENTITY, Case, tokenizer
from tests.e2e.conftest import BLOCK_SIZE
from tests.e2e.scripted.logits import scripted_logits

pytestmark = pytest.mark.parametrize("server", ["scripted"], indirect=True)


@pytest.fixture(scope="module")
def method(model: Path) -> Method:
    """`reference.py` on the end-to-end model; its drafter is set by the test."""
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return Method(target_logits(target), drafter=lambda _tokens: torch.empty(0), mode="sync")


@pytest.mark.parametrize("case", IDENTITY, ids=str)
def test_rounds_are_those_of_the_reference(
    server: RunningServer, plain: dict[str, Reply], method: Method, case: Case
) -> None:
    before = len(server.rounds())
    reply = server.ask(case)
    if not same_tokens(plain[case.name], reply):
        return
    script = server.script
    assert script is not None
    scene = script.find(case.prompt_ids)
    assert scene is not None
    draft = scripted_logits(script, scene, block_size=BLOCK_SIZE, vocab_size=len(tokenizer()))
    reference = Method(method.target, draft, mode="sync").generate(
        list(case.prompt_ids), case.max_new_tokens, eos_ids=frozenset({END_ID})
    )
    assert reply.output_ids == reference.output_ids
    ours = [
        (one.block[0], one.block[1:], one.accept_len) for one in rounds_of(reply, server.rounds()[before:])
    ]
    assert ours == [(one.anchor, one.draft, one.accept_len) for one in reference.rounds]


def test_every_accept_length_occurs(server: RunningServer, plain: dict[str, Reply]) -> None:
    before = len(server.rounds())
    replies = server.ask_together(ALL_LENGTHS, at_once=8)
    for reply in replies:
        same_tokens(plain[reply.case.name], reply)
    rounds = server.rounds()[before:]
    assert {one.accept_len for reply in replies for one in rounds_of(reply, rounds)} == set(range(BLOCK_SIZE))


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
    assert server.script is not None
    scene = server.script.find(CHUNKED.prompt_ids)
    for one in rounds_of(reply, server.rounds()[before:]):
        assert one.block[1:] == server.script.candidates(scene, one.committed_len, block_size=BLOCK_SIZE)
        left = len(scene.token_ids) - one.committed_len - 1
        error = server.script.error_position(scene, one.committed_len, block_size=BLOCK_SIZE)
        assert min(one.accept_len, left) == min(error, left)
    assert max(reply.histogram[1:], default=0) > 0
