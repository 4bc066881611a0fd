"""Rows to examples: templates, ids, end tokens, limits, and what is said about the rest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.train.chat_folder import (
    END_OF_TEXT,
    IM_END,
    MASK,
    PLAIN_TEMPLATE,
    TEMPLATE,
    ids_of,
    prompt_of,
    write_target,
)
from train.chat_format import ChatFormat, read_chat_format
from train.dataset import Dataset
from train.dataset_build import Source, build_dataset
from train.tokenise import Limits

LONG = Limits(max_length=200, mask_token_id=MASK)
EMPTY_PROMPT = len(prompt_of(""))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return read_chat_format(write_target(tmp_path_factory.mktemp("target")))


def row(row_id: str, *said: str | dict[str, Any]) -> dict[str, Any]:
    messages = [
        {"role": ("user", "assistant")[i % 2]} | (one if isinstance(one, dict) else {"content": one})
        for i, one in enumerate(said)
    ]
    return {"id": row_id, "conversations": messages}


def told(content: str, ids: list[int], finish_reason: str = "stop", **more: Any) -> dict[str, Any]:
    """An answer as a server gives it."""
    return {"content": content, "output_ids": ids, "finish_reason": finish_reason, **more}


def source(folder: Path, *rows: dict[str, Any] | str, limits: Limits = LONG, **settings: Any) -> Source:
    path = folder / "rows.jsonl"
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in rows))
    return Source((path,), limits, **settings)


def listed(dataset: Dataset) -> list[tuple[str, list[int], list[int]]]:
    examples = [dataset[i] for i in range(len(dataset))]
    assert {array.dtype for one in examples for array in (one.prompt_ids, one.response_ids)} <= {
        np.dtype("int32")
    }
    assert [len(one.prompt_ids) + len(one.response_ids) for one in examples] == list(dataset.lengths)
    return [(one.id, one.prompt_ids.tolist(), one.response_ids.tolist()) for one in examples]


def test_ids_of_the_server_are_taken_as_they_are(tmp_path: Path, target: ChatFormat) -> None:
    """The server's ids need not be those that its text is tokenised to; here a literal <think> in bytes."""
    ids = [*b"<think>", *b" so", IM_END]
    assert ids != [*ids_of("<think> so"), IM_END]
    answer = told("<think> so", ids, prompt_tokens=len(prompt_of("why?")))
    dataset = build_dataset(source(tmp_path, row("a", "why?", answer)), target)
    assert listed(dataset) == [("a", prompt_of("why?"), ids)]
    assert dataset.account.retokenised == 0


def test_text_is_tokenised_where_there_are_no_ids(tmp_path: Path, target: ChatFormat) -> None:
    dataset = build_dataset(source(tmp_path, row("a", "why? é", "so 好")), target)
    assert listed(dataset) == [("a", prompt_of("why? é"), [*ids_of("so 好"), IM_END])]
    assert dataset.account.retokenised == 1


def test_prompt_and_response_are_the_templated_conversation(tmp_path: Path) -> None:
    target = read_chat_format(write_target(tmp_path / "target", template=PLAIN_TEMPLATE))
    dataset = build_dataset(source(tmp_path, row("a", "one", "two", "three", "four")), target)
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": one}
        for i, one in enumerate(("one", "two", "three", "four"))
    ]
    whole = target.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    _, prompt, response = listed(dataset)[-1]
    assert prompt + response == whole[: len(prompt + response)]
    assert target.tokenizer.decode(whole[len(prompt + response) :]) == "\n"


def test_every_answer_of_a_conversation_is_an_example(tmp_path: Path, target: ChatFormat) -> None:
    rows = row("a", "one", told("two", [*b"two", IM_END]), "three", told("four", [*b"four", IM_END]))
    assert listed(build_dataset(source(tmp_path, rows), target)) == [
        ("a#1", prompt_of("one"), [*b"two", IM_END]),
        ("a#2", prompt_of("one", "two", "three"), [*b"four", IM_END]),
    ]


def test_end_tokens(tmp_path: Path, target: ChatFormat) -> None:
    rows = (
        row("ended", "q", told("ab", [*b"ab", IM_END])),
        row("ended otherwise", "q", told("ab", [*b"ab", END_OF_TEXT])),
        row("end not told", "q", told("ab", [*b"ab"])),
        row("cut", "q", told("ab", [*b"ab"], "length")),
        row("cut, no ids", "q", {"content": "ab", "finish_reason": "length"}),
        row("nothing said", "q", "ab"),
    )
    dataset = build_dataset(source(tmp_path, *rows), target)
    assert [(name, response) for name, _, response in listed(dataset)] == [
        ("ended", [*b"ab", IM_END]),
        ("ended otherwise", [*b"ab", END_OF_TEXT]),
        ("end not told", [*b"ab", IM_END]),
        ("cut", [*b"ab"]),
        ("cut, no ids", [*b"ab"]),
        ("nothing said", [*b"ab", IM_END]),
    ]
    assert (dataset.account.unfinished, dataset.account.retokenised) == (2, 2)


def test_limits(tmp_path: Path, target: ChatFormat) -> None:
    limit = EMPTY_PROMPT + 10
    rows = (
        row("fits", "1234", "12345"),  # 4 + 5 + the end token
        row("cut by one", "1234", "123456"),
        row("cut to two", "12345678", "123456"),
        row("no room", "123456789", "123456"),
        row("one token", "1", told("a", [97], "length")),
        row("fits too", "1", "1"),
    )
    dataset = build_dataset(
        source(tmp_path, *rows, limits=Limits(limit, MASK), max_dropped_share=0.4), target
    )
    assert [(name, bytes(response[:-1]), response[-1]) for name, _, response in listed(dataset)] == [
        ("fits", b"12345", IM_END),
        ("cut by one", b"12345", ord("6")),
        ("cut to two", b"1", ord("2")),
        ("fits too", b"1", IM_END),
    ]
    account = dataset.account
    assert (account.answers, account.examples, account.dropped) == (6, 4, 2)
    assert (account.truncated, account.long_prompt, account.short_response) == (2, 1, 1)
    assert account.prompt_tokens + account.response_tokens == sum(dataset.lengths)
    with pytest.raises(
        ValueError, match=r"share of 0\.333 .*allowed is 0\.3: .*\n.*'no room'.*max_length is"
    ):
        build_dataset(source(tmp_path, *rows, limits=Limits(limit, MASK), max_dropped_share=0.3), target)


def test_malformed_rows_are_dropped_and_counted(tmp_path: Path, target: ChatFormat) -> None:
    rows = (row("a", "q", "answer"), '{"id": "half', row("empty", "q", " "), row("b", "q", "answer"))
    dataset = build_dataset(source(tmp_path, *rows, max_dropped_share=0.5), target)
    assert [name for name, *_ in listed(dataset)] == ["a", "b"]
    assert dataset.account.malformed == 2 and dataset.account.dropped_share == 0.5
    assert "line 2: not valid JSON" in dataset.account.notes[0]
    assert "content is empty" in dataset.account.notes[1]
    with pytest.raises(ValueError, match=r"malformed 2"):
        build_dataset(source(tmp_path, *rows, max_dropped_share=0.49), target)


def test_nothing_usable(tmp_path: Path, target: ChatFormat) -> None:
    with pytest.raises(ValueError, match="no answer is usable"):
        build_dataset(source(tmp_path, '{"id": 1}', max_dropped_share=1.0), target)


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        (row("bad", "say <|mask|>", "ok"), "prompt holds the mask token 261 at position 10"),
        (row("bad", "q", "ab<|mask|>"), "response holds the mask token 261 at position 2"),
        (row("bad", "q", told("ab", [97, MASK, 98])), "response holds the mask token 261 at position 1"),
    ],
)
def test_mask_token_in_the_data(tmp_path: Path, target: ChatFormat, rows: dict[str, Any], where: str) -> None:
    with pytest.raises(ValueError, match=r"row 'bad' \(.*rows\.jsonl, line 2\): its " + where):
        build_dataset(source(tmp_path, row("good", "q", "ok"), rows), target)


def test_another_template_at_the_server(tmp_path: Path, target: ChatFormat) -> None:
    right = len(prompt_of("q"))
    rows = [row(f"{i}", "q", told("ab", [*b"ab", IM_END], prompt_tokens=right)) for i in range(9)]
    rows.append(row("off", "q", told("ab", [*b"ab", IM_END], prompt_tokens=right - 2)))
    dataset = build_dataset(source(tmp_path, *rows, max_dropped_share=0.1), target)
    assert (len(dataset), dataset.account.template) == (9, 1)
    with pytest.raises(
        ValueError, match=f"saw {right - 2} prompt tokens, the chat template here gives {right}"
    ):
        build_dataset(source(tmp_path, *rows), target)


def test_a_template_that_refuses(tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    target = read_chat_format(write_target(tmp_path / "target", template=template))
    refused = row("a", "q", "ab")
    refused["conversations"].insert(0, {"role": "system", "content": "be brief"})
    dataset = build_dataset(source(tmp_path, refused, row("b", "q", "ab"), max_dropped_share=0.5), target)
    assert [name for name, *_ in listed(dataset)] == ["b"]
    assert "the chat template refuses it (no system)" in dataset.account.notes[0]


def test_answers_of_another_tokenizer(tmp_path: Path, target: ChatFormat) -> None:
    with pytest.raises(ValueError, match=r"row 'a'.* holds token 900, the tokenizer has 262"):
        build_dataset(source(tmp_path, row("a", "q", told("x", [900, IM_END], "length"))), target)
    rows = [row(f"{i}", "q", told("other", [*b"words", IM_END])) for i in range(3)]
    with pytest.raises(ValueError, match=r"3 of 3 answers are not the text of their token ids.*row '0'"):
        build_dataset(source(tmp_path, *rows), target)


def test_thinking_is_told_to_the_template(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target")
    off, on = read_chat_format(folder), read_chat_format(folder, thinking=True)
    asked = source(tmp_path, row("a", "q", "ab"))
    assert listed(build_dataset(asked, off))[0][1] == prompt_of("q")
    assert listed(build_dataset(asked, on))[0][1] == prompt_of("q")[:-2]
    assert off.fingerprint != on.fingerprint


@pytest.mark.parametrize(
    ("template", "end_ids", "expected"),
    [
        (TEMPLATE, (END_OF_TEXT, IM_END), IM_END),  # the one that the template writes
        (TEMPLATE, (), END_OF_TEXT),  # no generation config: <|im_end|> is not known to end anything
        (TEMPLATE.replace("<|im_end|>", ""), (IM_END,), IM_END),
        (TEMPLATE.replace("<|im_end|>", "<|end|>"), (IM_END,), END_OF_TEXT),
    ],
)
def test_turn_end(tmp_path: Path, template: str, end_ids: tuple[int, ...], expected: int) -> None:
    chat_format = read_chat_format(write_target(tmp_path, template=template, end_ids=end_ids))
    assert chat_format.turn_end_id == expected
    assert chat_format.end_ids == {*end_ids, END_OF_TEXT}


def test_folders_that_are_no_chat_target(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no tokenizer that can be read"):
        read_chat_format(tmp_path)
    with pytest.raises(ValueError, match="has no chat template"):
        read_chat_format(write_target(tmp_path, template=""))


def test_settings_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_length is 2"):
        Limits(2, MASK)
    with pytest.raises(ValueError, match=r"max_dropped_share is 1\.1"):
        source(tmp_path, max_dropped_share=1.1)
    with pytest.raises(ValueError, match="no files"):
        replace(source(tmp_path), files=())
