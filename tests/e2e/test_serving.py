"""The server around the method: routes, streams, counts, metrics, state."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.e2e.asking import Reply, RunningServer, same_reply, same_tokens
from tests.e2e.cases import IDENTITY
from tests.e2e.conftest import BLOCK_SIZE
from tests.e2e.prompts import PROMPTS

pytestmark = pytest.mark.parametrize("server", ["drafter"], indirect=True)

CASE = IDENTITY[0]


@pytest.fixture
def openai(server: RunningServer) -> OpenAI:
    return OpenAI(base_url=f"{server.process.url}/v1", api_key="none")


def test_the_overlap_scheduler_is_on(server: RunningServer) -> None:
    info = server.process.server_info()
    assert info["disable_overlap_schedule"] is False
    assert info["speculative_algorithm"] == "D3D"
    assert info["speculative_num_draft_tokens"] == BLOCK_SIZE


def test_chunks_of_a_stream_make_the_answer(server: RunningServer, plain: dict[str, Reply]) -> None:
    body = {"input_ids": CASE.prompt_ids, "sampling_params": CASE.sampling_params, "stream": True}
    with httpx.stream("POST", f"{server.process.url}/generate", json=body, timeout=60.0) as response:
        chunks = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert chunks.pop() == "[DONE]"
    replies = [Reply(CASE, json.loads(chunk)) for chunk in chunks]
    assert len(replies) > 3
    texts = [reply.text for reply in replies]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    same_reply(plain[CASE.name], replies[-1])


def test_openai_stream_and_answer_agree(
    server: RunningServer, openai: OpenAI, plain: dict[str, Reply]
) -> None:
    asked = {
        "model": "default",
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": PROMPTS[6]},
        ],
        "temperature": 0,
        "max_tokens": 24,
    }
    answer = openai.chat.completions.create(**asked)
    chunks = list(
        openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == answer.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens


def test_openai_completions_are_plain(server: RunningServer, openai: OpenAI, plain: dict[str, Reply]) -> None:
    for case in (CASE, IDENTITY[7]):
        expected = plain[case.name]
        answer = openai.completions.create(
            model="default", prompt=list(case.prompt_ids), temperature=0, max_tokens=case.max_new_tokens
        )
        assert answer.choices[0].text == expected.text
        assert answer.choices[0].finish_reason == expected.ended_by
        assert answer.usage.prompt_tokens == len(case.prompt_ids)
        assert answer.usage.completion_tokens == len(expected.output_ids)


def test_several_answers_to_one_prompt(server: RunningServer, plain: dict[str, Reply]) -> None:
    raws = server.process.generate(CASE.prompt_ids, sampling={**CASE.sampling_params, "n": 2})
    assert len(raws) == 2
    for raw in raws:
        same_reply(plain[CASE.name], Reply(CASE, raw))


def test_counts_of_a_request_fit_together(server: RunningServer) -> None:
    meta = server.ask(CASE).meta
    check_counts(meta, completion_tokens=meta["completion_tokens"])


def test_openai_answers_carry_the_same_counts(server: RunningServer) -> None:
    body = {"temperature": 0, "max_tokens": 12, "return_spec_tokens_details": True}
    answer = server.process.chat(PROMPTS[3], **body)
    details = find_key(answer, "spec_tokens_details")
    check_counts(details, completion_tokens=answer["usage"]["completion_tokens"])


def check_counts(counts: dict[str, Any], *, completion_tokens: int) -> None:
    rounds, correct = counts["spec_verify_ct"], counts["spec_num_correct_drafts"]
    proposed, histogram = counts["spec_num_proposed_drafts"], counts["spec_correct_drafts_histogram"]
    assert rounds > 0
    assert counts["spec_accept_length"] == pytest.approx(completion_tokens / rounds)
    assert proposed == rounds * (BLOCK_SIZE - 1)
    assert counts["spec_accept_rate"] == pytest.approx(correct / proposed)
    assert sum(histogram) == rounds
    assert sum(k * count for k, count in enumerate(histogram)) == correct
    # The first token comes from the prefill; the last run may go past the end.
    assert 1 + rounds + correct >= completion_tokens


def find_key(value: Any, key: str) -> Any:
    """The value of `key` in a nested answer."""
    if isinstance(value, dict):
        if value.get(key) is not None:
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        return next((found for one in value if (found := find_key(one, key)) is not None), None)
    return None


def test_the_state_route_counts_rounds_and_shows_options(server: RunningServer) -> None:
    before = server.state()
    reply = server.ask(CASE)
    after = server.state()
    assert after["block_size"] == BLOCK_SIZE
    assert after["options"] == {
        "mode": "async",
        "coverage": 4,
        "fanout": 1,
        "miss": "redraft",
        "draft_sampling": "match",
        "drafter_device": "target",
    }
    given = {"mode", "coverage", "fanout"}
    assert after["option_sources"] == {
        name: f"SGLANG_D3D_{name.upper()}" if name in given else "default" for name in after["options"]
    }
    assert sum(after["row_rounds_by_origin"].values()) >= after["row_rounds"]
    assert after["fallbacks"] == {}
    histogram = after["accept_length_histogram"]
    assert len(histogram) == BLOCK_SIZE
    assert sum(histogram) == after["row_rounds"] >= after["rounds"]
    accepted = sum(k * count for k, count in enumerate(histogram))
    assert accepted == after["accepted_tokens"]
    assert after["tau"] == pytest.approx(1 + accepted / after["row_rounds"])
    grown = [new - old for new, old in zip(histogram, before["accept_length_histogram"], strict=True)]
    expected = reply.histogram + [0] * (BLOCK_SIZE - len(reply.histogram))
    assert grown == expected
    assert after["rounds"] - before["rounds"] == reply.meta["spec_verify_ct"]


def test_metrics_have_the_speculative_gauges(server: RunningServer) -> None:
    server.ask(CASE)
    text = server.process.request("GET", "/metrics").text
    values = dict(re.findall(r"^(sglang:spec_\w+)\{.*\} (\S+)$", text, flags=re.MULTILINE))
    assert {"sglang:spec_accept_length", "sglang:spec_accept_rate"} <= values.keys(), sorted(values)
    assert float(values["sglang:spec_num_draft_tokens"]) == BLOCK_SIZE
    assert float(values["sglang:spec_num_steps"]) == BLOCK_SIZE - 1


def test_the_cache_can_be_flushed_between_requests(server: RunningServer, plain: dict[str, Reply]) -> None:
    for _ in range(2):
        server.process.flush_cache()
        reply = server.ask(CASE)
        assert reply.meta["cached_tokens"] == 0
        same_tokens(plain[CASE.name], reply)


def test_the_effective_options_are_logged_once(server: RunningServer) -> None:
    lines = [line for line in server.log().splitlines() if f"D3D: block_size={BLOCK_SIZE}" in line]
    assert len(lines) == 1 and "mode=async (SGLANG_D3D_MODE) coverage=4" in lines[0]
