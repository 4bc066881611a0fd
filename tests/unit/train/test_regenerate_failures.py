"""Endpoints that die or refuse, full disks and kills: no prompt is lost, none is answered twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.train.chat_server import ChatServer, echo
from tests.unit.train.regeneration_session import (
    TIMEOUT_S,
    arguments,
    check_account,
    numbered,
    plan,
    read,
    run,
    write_prompts,
)
from train.asking import EndpointsLostError, Patience
from train.regenerate import main
from train.regeneration import Regeneration
from train.row_file import RowFile

ROOT = Path(__file__).resolve().parents[3]


def test_a_failure_in_a_later_turn_keeps_the_earlier_answer(tmp_path: Path) -> None:
    failures = iter([True, False])

    def answer(request: dict[str, Any]) -> Any:
        return None if len(request["messages"]) == 3 and next(failures) else echo(request)

    write_prompts(tmp_path, {"id": "mt", "turns": ["one", "two"]})
    with ChatServer(answer).running() as server:
        run(plan(tmp_path), server)
    assert server.questions == ["one", "two", "two"]
    check_account(tmp_path, prompts=1, success=1)


def test_an_endpoint_that_dies_midway_is_replaced_by_the_others(tmp_path: Path) -> None:
    write_prompts(tmp_path, *numbered(60))
    healthy, dying = ChatServer(delay_s=0.01), ChatServer(delay_s=0.01, dies_after=7)
    with healthy.running(), dying.running():
        _, warnings = run(plan(tmp_path), healthy, dying)
    check_account(tmp_path, prompts=60, success=60)
    assert dying.num_answers >= 7
    assert [warning for warning in warnings if f"{dying.url}: dropped after 3 failures" in warning]
    assert not [warning for warning in warnings if healthy.url in warning]


def test_an_endpoint_that_comes_back_is_kept(tmp_path: Path) -> None:
    broken = iter([False] * 5 + [True] * 2)

    def answer(request: dict[str, Any]) -> Any:
        return (503, {"message": "loading"}) if next(broken, False) else echo(request)

    write_prompts(tmp_path, *numbered(20))
    with ChatServer(answer).running() as server:
        _, warnings = run(plan(tmp_path), server, at_once=1)
    check_account(tmp_path, prompts=20, success=20)
    assert ["failure 1 of 3" in warnings[0], "failure 2 of 3" in warnings[1]] == [True, True]
    assert len(warnings) == 2


def test_all_endpoints_lost_then_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_prompts(tmp_path, *numbered(50))
    first, second = ChatServer(dies_after=12), ChatServer(dies_after=9)
    with first.running(), second.running():
        assert main(arguments(tmp_path, first.url, second.url, extra=("--greedy", "--concurrency", "2"))) == 2
    said = capsys.readouterr()
    kept = read(tmp_path / "out.jsonl")
    # a dropped endpoint's other request, of two, is given up too
    assert 12 + 9 - 2 <= len(kept) <= 12 + 9
    assert "error: all endpoints are lost" in said.err
    assert "the same command goes on" in said.err
    assert "Traceback" not in said.err
    assert f"{50 - len(kept)} still to ask = 50 prompts" in said.out
    with ChatServer().running() as third:
        assert main(arguments(tmp_path, first.url, third.url)) == 0
    check_account(tmp_path, prompts=50, success=50)
    assert read(tmp_path / "out.jsonl")[: len(kept)] == kept
    assert len(third.questions) == 50 - len(kept), "an answered prompt was asked again"
    assert f"warning: {first.url}: left out" in capsys.readouterr().out


def test_a_prompt_that_breaks_every_connection_is_given_up(tmp_path: Path) -> None:
    def answer(request: dict[str, Any]) -> Any:
        return None if request["messages"][-1]["content"] == "say 3" else echo(request)

    write_prompts(tmp_path, *numbered(30))
    with ChatServer(answer).running() as server:
        run(plan(tmp_path), server, at_once=1)
    check_account(tmp_path, prompts=30, success=29, error=1)
    (error,) = read(tmp_path / "out_error.jsonl")
    assert error["id"] == "p3" and error["error"].startswith(
        "3 endpoint failures, the last: the connection broke"
    )


def test_wrong_address_loses_the_endpoint_not_the_prompts(tmp_path: Path) -> None:
    write_prompts(tmp_path, *numbered(5))
    with ChatServer(lambda _request: (404, {"message": "no such route"})).running() as server:
        with pytest.raises(EndpointsLostError, match="5 prompts are still to be asked"):
            run(plan(tmp_path), server)
    assert not read(tmp_path / "out_error.jsonl")


@pytest.mark.parametrize(
    "body", [b"<html>", {"choices": []}, {"choices": [{"message": None}]}, {"choices": 3}, []]
)
def test_responses_of_another_form_are_failures(tmp_path: Path, body: Any) -> None:
    write_prompts(tmp_path, *numbered(2))
    with ChatServer(lambda _request: (200, body)).running() as server:
        with pytest.raises(EndpointsLostError):
            run(plan(tmp_path), server, patience=Patience(failures=2, attempts=9, pause_s=0.01))


def test_half_written_last_line_is_dropped_and_asked_again(tmp_path: Path) -> None:
    write_prompts(tmp_path, *numbered(10))
    with ChatServer().running() as server:
        run(plan(tmp_path), server)
    out = tmp_path / "out.jsonl"
    whole = read(out)
    out.write_bytes(out.read_bytes()[:-5])
    with ChatServer().running() as server:
        run(plan(tmp_path), server)
    assert server.questions == [whole[-1]["conversations"][0]["content"]]
    assert read(out) == whole


def test_full_disk_keeps_the_rows_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_prompts(tmp_path, *numbered(30))
    write, room = os.write, 1500

    def write_until_full(file: int, data: Any) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(28, "No space left on device")
        written = write(file, bytes(data)[: min(room, 100)])  # never a whole row at once
        room -= written
        return written

    with ChatServer().running() as server, monkeypatch.context() as patched:
        patched.setattr("train.row_file.os.write", write_until_full)
        assert main(arguments(tmp_path, server.url)) == 2
    assert room <= 0
    assert "error: [Errno 28] No space left on device" in capsys.readouterr().err
    content = (tmp_path / "out.jsonl").read_bytes()
    kept = read(tmp_path / "out.jsonl")
    assert content.endswith(b"}\n") and 0 < len(kept) < 30
    with ChatServer().running() as server:
        assert main(arguments(tmp_path, server.url)) == 0
    check_account(tmp_path, prompts=30, success=30)
    assert read(tmp_path / "out.jsonl")[: len(kept)] == kept


def test_only_one_process_writes(tmp_path: Path) -> None:
    write_prompts(tmp_path, *numbered(3))
    with RowFile(tmp_path / "out.jsonl"), pytest.raises(ValueError, match="being written by another process"):
        Regeneration(plan(tmp_path))


def test_killed_and_resumed(tmp_path: Path) -> None:
    write_prompts(tmp_path, *numbered(80))
    out = tmp_path / "out.jsonl"
    with ChatServer(delay_s=0.05).running() as server:
        command = [sys.executable, "-m", "train.regenerate", *arguments(tmp_path, server.url)]
        command += ["--concurrency", "2"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + TIMEOUT_S
        while len(read(out)) < 10 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kept = read(out)
        assert 10 <= len(kept) < 80
        server.delay_s = 0.0
        assert main(arguments(tmp_path, server.url)) == 0
    check_account(tmp_path, prompts=80, success=80)
    assert read(out)[: len(kept)] == kept


def test_interrupt_says_how_to_go_on(tmp_path: Path) -> None:
    write_prompts(tmp_path, *numbered(80))
    out = tmp_path / "out.jsonl"
    with ChatServer(delay_s=0.05).running() as server:
        command = [sys.executable, "-m", "train.regenerate", *arguments(tmp_path, server.url)]
        process = subprocess.Popen(
            [*command, "--concurrency", "2"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + TIMEOUT_S
        while len(read(out)) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        said, complaint = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert complaint.splitlines()[0] == "interrupted" and "goes on from there" in complaint
    assert "still to ask = 80 prompts" in said


def test_no_endpoint_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_prompts(tmp_path, *numbered(2))
    assert main(arguments(tmp_path, "http://127.0.0.1:9")) == 2
    said = capsys.readouterr()
    assert "error: no endpoint answers" in said.err and "cannot connect" in said.out


def test_errors_are_asked_again(tmp_path: Path) -> None:
    write_prompts(tmp_path, *numbered(10))

    def answer(request: dict[str, Any]) -> Any:
        return (400, {"message": "no"}) if request["messages"][-1]["content"] == "say 3" else echo(request)

    with ChatServer(answer).running() as server:
        run(plan(tmp_path), server)
    check_account(tmp_path, prompts=10, success=9, error=1)
    with ChatServer().running() as server:
        regeneration, _ = run(plan(tmp_path), server)
    assert server.questions == ["say 3"] and regeneration.num_before == 9
    check_account(tmp_path, prompts=10, success=10)
