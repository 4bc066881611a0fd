"""Regeneration against a server on a real socket: what is asked, what is kept, and the account."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.train.chat_server import MODEL, ChatServer, echo, reply
from tests.unit.train.regeneration_session import (
    arguments,
    check_account,
    numbered,
    plan,
    read,
    run,
    write_prompts,
)
from train.endpoints import Question
from train.regenerate import main
from train.regeneration import Regeneration
from train.sampling import GREEDY


def test_every_prompt_is_accounted_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(request: dict[str, Any]) -> Any:
        asked = request["messages"][-1]["content"]
        special = {
            "say 1": (400, {"object": "error", "message": "the input is too long"}),
            "say 2": reply("", ids=[2]),
            "say 3": reply(" \n "),
            "say 4": reply("cut he", ids=[7] * 16, finish="length"),
            "say 5": reply("tools", finish="tool_calls"),
            "say 6": reply("no ids"),
        }
        return special.get(asked, echo(request))

    write_prompts(tmp_path, *numbered(200), {"id": "p0", "prompt": "again"}, '{"id": "p')
    with ChatServer(answer).running() as server:
        assert main(arguments(tmp_path, server.url)) == 0
    check_account(tmp_path, prompts=202, success=196, error=4, skipped=2)
    errors = {row["id"]: row["error"] for row in read(tmp_path / "out_error.jsonl")}
    assert errors["p1"] == "status 400: the input is too long"
    assert errors["p2"] == errors["p3"] == "the answer is empty"
    assert "'tool_calls'" in errors["p5"]
    skipped = read(tmp_path / "out_skipped.jsonl")
    assert [row["line"] for row in skipped] == [201, 202]
    rows = {row["id"]: row["conversations"] for row in read(tmp_path / "out.jsonl")}
    assert rows["p0"] == [
        {"role": "user", "content": "say 0"},
        {
            "role": "assistant",
            "content": "re: say 0",
            "output_ids": [1, 7, 2],
            "finish_reason": "stop",
            "prompt_tokens": 5,
        },
    ]
    assert rows["p4"][1]["finish_reason"] == "length"
    assert "output_ids" not in rows["p6"][1]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == ("196 answered + 4 errors + 2 skipped = 202 prompts; 1 cut, 1 without token ids")


def test_what_is_asked(tmp_path: Path) -> None:
    write_prompts(
        tmp_path,
        {"id": "a", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    )
    with ChatServer().running() as server:
        assert main(arguments(tmp_path, f"{server.url}/v1/")) == 0
    assert server.requests == [
        {
            "model": MODEL,
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
            "max_tokens": 16,
            "stream": False,
            "return_token_ids": True,
            "chat_template_kwargs": {"enable_thinking": False},
            "temperature": 0.0,
        }
    ]


def test_recommended_sampling_with_one_value_given(tmp_path: Path) -> None:
    recommended = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    write_prompts(tmp_path, *numbered(1))
    extra = ("--model-path", str(tmp_path), "--top-k", "5", "--thinking")
    with ChatServer().running() as server:
        assert main(arguments(tmp_path, server.url, extra=extra)) == 0
    (request,) = server.requests
    assert {name: request.get(name) for name in ("temperature", "top_p", "top_k", "min_p")} == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 5,
        "min_p": None,
    }
    assert request["chat_template_kwargs"] == {"enable_thinking": True}


def test_turns_are_answered_one_after_the_other(tmp_path: Path) -> None:
    write_prompts(tmp_path, {"id": "mt", "turns": ["one", "two", "three"]})
    with ChatServer().running() as server:
        run(plan(tmp_path), server)
    told = [[message["content"] for message in request["messages"]] for request in server.requests]
    assert told == [
        ["one"],
        ["one", "re: one", "two"],
        ["one", "re: one", "two", "re: two", "three"],
    ]
    (row,) = read(tmp_path / "out.jsonl")
    answers = [message for message in row["conversations"] if message["role"] == "assistant"]
    assert [answer["output_ids"][0] for answer in answers] == [1, 3, 5]


def test_concurrency_is_bounded_at_each_endpoint(tmp_path: Path) -> None:
    write_prompts(tmp_path, *numbered(40))
    first, second = ChatServer(delay_s=0.03), ChatServer(delay_s=0.03)
    with first.running(), second.running():
        run(plan(tmp_path), first, second, at_once=3)
    assert first.most_at_once == second.most_at_once == 3
    check_account(tmp_path, prompts=40, success=40)


def test_only_refusals_stop_the_run(tmp_path: Path) -> None:
    write_prompts(tmp_path, *numbered(500))
    with ChatServer(lambda _request: (400, {"error": {"message": "unknown field"}})).running() as server:
        with pytest.raises(ValueError, match=r"first 20 prompts were all refused: status 400: unknown field"):
            run(plan(tmp_path), server, at_once=1)
    assert len(server.requests) == 20


def test_other_settings_or_prompts_are_refused(tmp_path: Path) -> None:
    write_prompts(tmp_path, *numbered(3))
    with ChatServer().running() as server:
        run(plan(tmp_path), server)
    with pytest.raises(ValueError, match="max_tokens 16 before, 32 now"):
        Regeneration(plan(tmp_path, question=Question(MODEL, GREEDY, max_tokens=32)))
    write_prompts(tmp_path, *numbered(2))
    with pytest.raises(ValueError, match=r"an answer to 'p2', which is not in"):
        Regeneration(plan(tmp_path))
    write_prompts(tmp_path, *numbered(2), {"id": "p2", "prompt": "something else"})
    with pytest.raises(ValueError, match=r"answer to 'p2', .* or asks something else"):
        Regeneration(plan(tmp_path))


def test_damaged_answers_are_not_touched(tmp_path: Path) -> None:
    write_prompts(tmp_path, *numbered(3))
    (tmp_path / "out.jsonl").write_text("notes of mine\nmore\n")
    with pytest.raises(ValueError, match=r"out.jsonl, line 1: not valid JSON"):
        Regeneration(plan(tmp_path))
    assert (tmp_path / "out.jsonl").read_text() == "notes of mine\nmore\n"


def test_limit_and_spread(tmp_path: Path) -> None:
    write_prompts(tmp_path, *numbered(10))

    def chosen(**changes: int) -> list[str]:
        return [prompt.id for prompt in Regeneration(plan(tmp_path, **changes)).to_ask]

    assert chosen(limit=3) == ["p0", "p1", "p2"]
    assert chosen(spread=4) == ["p0", "p2", "p5", "p7"]
    with pytest.raises(ValueError, match="11 prompts wanted"):
        chosen(limit=11)
    with pytest.raises(ValueError, match="limit is 0"):
        chosen(limit=0)
    with pytest.raises(ValueError, match="leave out one"):
        chosen(limit=1, spread=1)


def test_a_raised_limit_goes_on(tmp_path: Path) -> None:
    write_prompts(tmp_path, *numbered(10))
    with ChatServer().running() as server:
        run(plan(tmp_path, limit=4), server)
        check_account(tmp_path, prompts=4, success=4)
        run(plan(tmp_path, limit=7), server)
    check_account(tmp_path, prompts=7, success=7)
    assert len(server.requests) == 7


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ((), "how to sample is not known"),
        (("--greedy", "--temperature", "1"), "greedy answers have no temperature"),
        (("--temperature", "3"), "temperature is 3.0, allowed are 0 to 2"),
        (("--temperature", "1", "--top-p", "0"), "top_p is 0.0"),
        (("--model-path", "/absent"), "no generation_config.json in /absent"),
        (("--greedy", "--max-tokens", "1"), "max_tokens is 1"),
        (("--greedy", "--concurrency", "0"), "concurrency is 0"),
        (("--greedy", "--timeout", "0"), "timeout is 0.0"),
        (("--greedy", "--max-failures", "0"), "failures is 0"),
        (("--greedy", "--out", "answers.json"), "must end in .jsonl"),
        (("--greedy", "--prompts", "/absent.jsonl"), "no file /absent.jsonl"),
        (("--greedy", "--endpoint", "localhost:30000"), "endpoint 'localhost:30000' must be an address"),
        (("--greedy", "--model", "other"), "model 'other' is not served by"),
        (("--greedy", "--api-key-env", "D3D_NOT_SET"), "D3D_NOT_SET, which is not set"),
    ],
)
def test_wrong_options_are_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: tuple[str, ...], message: str
) -> None:
    write_prompts(tmp_path, *numbered(2))
    with ChatServer().running() as server:
        assert main(arguments(tmp_path, server.url, extra=extra)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert not server.requests
