"""Reading rows: every form, what is refused and with which words, and that a bad line costs no other line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from train.conversations import (
    Message,
    Prompt,
    parse_conversation,
    parse_prompt,
    read_conversations,
    read_lines,
    read_prompts,
)

USER, ASSISTANT, SYSTEM = (
    {"role": "user", "content": "why?"},
    {"role": "assistant", "content": "because"},
    {"role": "system", "content": "be brief"},
)


def write_lines(path: Path, *lines: bytes | dict[str, Any]) -> Path:
    packed = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    content = b"".join(line + b"\n" for line in packed)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def conversation(row_id: str, *messages: dict[str, Any]) -> dict[str, Any]:
    return {"id": row_id, "conversations": list(messages)}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_reads_both_files(tmp_path: Path, name: str) -> None:
    # U+2028 ends a line for str.splitlines(), but not in a JSON Lines file
    odd = {"role": "assistant", "content": "first\u2028second"}
    text = json.dumps(conversation("a", USER, odd), ensure_ascii=False).encode()
    path = write_lines(tmp_path / name, text, b"", conversation("b", SYSTEM, USER, ASSISTANT))
    reader = read_conversations(path)
    rows = list(reader)
    assert [row.id for row in rows] == ["a", "b"]
    assert rows[0].messages[1].content == "first\u2028second"
    assert [message.role for message in rows[1].messages] == ["system", "user", "assistant"]
    assert (reader.num_lines, reader.refusals) == (2, [])


def test_answer_with_ids_survives_writing_and_reading() -> None:
    answer = {**ASSISTANT, "output_ids": [5, 6, 2], "finish_reason": "stop", "prompt_tokens": 9}
    row = conversation("a", USER, answer)
    parsed = parse_conversation(row)
    assert parsed.messages[1].output_ids is not None
    assert parsed.messages[1].output_ids.dtype == "int32"
    assert parsed.to_dict() == row


def test_sharegpt_spelling_is_converted() -> None:
    row = {
        "id": 7,
        "conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "because"}],
    }
    parsed = parse_conversation(row)
    assert parsed.to_dict() == conversation("7", USER, ASSISTANT)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"id": "a", "prompt": "why?"}, Prompt("a", None, ("why?",))),
        ({"id": "a", "turns": ["why?", "and?"]}, Prompt("a", None, ("why?", "and?"))),
        ({"id": "a", "messages": [USER]}, Prompt("a", None, ("why?",))),
        ({"id": "a", "messages": [SYSTEM, USER], "prompt": None}, Prompt("a", "be brief", ("why?",))),
        # answers of somebody else are left aside
        ({"id": "a", "messages": [USER, ASSISTANT, USER]}, Prompt("a", None, ("why?", "why?"))),
        (conversation("a", USER, ASSISTANT), Prompt("a", None, ("why?",))),
    ],
)
def test_forms_of_a_prompt(row: dict[str, Any], expected: Prompt) -> None:
    assert parse_prompt(row) == expected


def test_opening() -> None:
    (message,) = Prompt("a", "be brief", ("why?",)).opening
    assert (message.role, message.content) == ("system", "be brief")
    assert Prompt("a", None, ("why?",)).opening == ()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (conversation("a"), "conversations must be a list of messages that is not empty"),
        ({"id": "a"}, "conversations must be a list"),
        (conversation("a", USER), "last message must be an answer of the assistant, it is the user's"),
        (conversation("a", ASSISTANT), r"conversations\[0\] must be the user's, it is the assistant's"),
        (conversation("a", USER, ASSISTANT, ASSISTANT), r"conversations\[2\] must be the user's"),
        (conversation("a", USER, SYSTEM), r"conversations\[1\] must be the assistant's"),
        (conversation("a", SYSTEM), "only a system message"),
        (conversation("a", USER, {"role": "tool", "content": "x"}), r"\[1\].role is 'tool', allowed are"),
        (conversation("a", USER, {"role": "assistant", "content": " \n"}), r"\[1\].content is empty"),
        (conversation("a", USER, {"role": "assistant", "content": None}), "must be a text, it is NoneType"),
        (conversation("a", USER, {"role": "assistant", "content": "\ud800"}), "not valid Unicode"),
        (conversation("a", {"from": "bard", "value": "x"}), "from is 'bard', allowed are human, gpt"),
        (conversation("", USER, ASSISTANT), "id is empty"),
        ({"conversations": [USER, ASSISTANT]}, "id must be a text, it is NoneType"),
        (conversation("a", USER, {**ASSISTANT, "output_ids": []}), "list of token ids that is not empty"),
        (conversation("a", USER, {**ASSISTANT, "output_ids": [1, -4]}), "no token ids"),
        (conversation("a", USER, {**ASSISTANT, "output_ids": [1, 2**31]}), "no token ids"),
        (conversation("a", USER, {**ASSISTANT, "output_ids": [True]}), "list of token ids"),
        (conversation("a", USER, {**ASSISTANT, "finish_reason": 3}), "finish_reason must be str"),
    ],
)
def test_conversation_of_another_form(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_conversation(row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "a"}, "it has none"),
        ({"id": "a", "prompt": "x", "turns": ["x"]}, "it has prompt and turns"),
        ({"id": "a", "turns": []}, "turns must be a list"),
        ({"id": "a", "turns": ["x", 3]}, r"turns\[1\] must be a text, it is int"),
        ({"id": "a", "prompt": ""}, "prompt is empty"),
        ({"id": True, "prompt": "x"}, "id must be a text"),
    ],
)
def test_prompt_of_another_form(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_prompt(row)


BAD_LINES = (
    b'{"id": "half", "prompt": "cut he',
    b'"only a text"',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"id": "row-0", "prompt": "the same id"}',
)


def test_bad_lines_are_counted_with_their_numbers(tmp_path: Path) -> None:
    good = [{"id": f"row-{i}", "prompt": f"say {i}"} for i in range(10)]
    path = write_lines(tmp_path / "rows.jsonl", *good[:5], b"", *BAD_LINES, *good[5:])
    reader = read_prompts(path, max_refused_share=0.5)
    assert [row.id for row in reader] == [row["id"] for row in good]
    assert [refusal.line for refusal in reader.refusals] == [7, 8, 9, 10, 11]
    assert reader.num_lines == 15
    reasons = [str(refusal) for refusal in reader.refusals]
    assert "line 7: not valid JSON" in reasons[0]
    assert "must be a JSON object, it is str" in reasons[1]
    assert "'row-0' was seen before" in reasons[4]


def test_too_many_bad_lines(tmp_path: Path) -> None:
    good = [{"id": f"row-{i}", "prompt": f"say {i}"} for i in range(15)]
    path = write_lines(tmp_path / "rows.jsonl", *good, *BAD_LINES)
    assert len(list(read_prompts(path, max_refused_share=0.25))) == 15
    with pytest.raises(ValueError, match=r"5 of 20 rows .*(\n.*line 1[678].*){3}\n  and 2 more"):
        list(read_prompts(path, max_refused_share=0.24))


def test_ids_are_unique_over_files(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "a.jsonl", {"id": "x", "prompt": "p"})
    second = write_lines(tmp_path / "b.jsonl", {"id": "x", "prompt": "q"})
    with pytest.raises(ValueError, match=r"b\.jsonl, line 1: id 'x' was seen before"):
        list(read_prompts(first, second))


def test_reading_twice_gives_the_same(tmp_path: Path) -> None:
    reader = read_prompts(write_lines(tmp_path / "a.jsonl", {"id": "x", "prompt": "p"}))
    assert list(reader) == list(reader)
    assert reader.num_lines == 1


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file"):
        list(read_prompts(tmp_path / "absent.jsonl"))
    with pytest.raises(ValueError, match="must end in"):
        list(read_prompts(write_lines(tmp_path / "rows.json", {"id": "x", "prompt": "p"})))
    with pytest.raises(ValueError, match="no rows"):
        list(read_prompts(write_lines(tmp_path / "rows.jsonl", b"", b"")))


@pytest.mark.parametrize("damage", ["cut", "not_gzip"])
def test_damaged_gzip(tmp_path: Path, damage: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl.gz", *({"id": f"{i}", "prompt": "p" * i} for i in range(99)))
    path.write_bytes(path.read_bytes()[:-40] if damage == "cut" else b'{"id": "x", "prompt": "p"}\n')
    with pytest.raises(ValueError, match="damaged after line"):
        list(read_lines(path))


def test_message_without_answer_fields() -> None:
    assert Message("user", "why?").to_dict() == USER


def test_share_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_refused_share is 1\.5"):
        read_prompts(tmp_path / "a.jsonl", max_refused_share=1.5)
