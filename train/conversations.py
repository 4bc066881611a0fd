"""Conversations and prompts in JSON Lines files: reading, checking, and counting what is refused.

A conversation holds the target's answers: `{"id", "conversations": [{"role", "content"}, ...]}`. A prompt
holds what the target is to be asked: `{"id", "messages"}`, `{"id", "prompt"}`, `{"id", "turns"}`, or a
conversation, whose answers are then left aside. Files end in .jsonl or .jsonl.gz and are read a line at a
time. Knows neither tokenizers nor servers.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

# Of all lines; a file with more bad ones is not what the user takes it for.
MAX_REFUSED_SHARE = 0.01
# Raw ShareGPT spells {"role", "content"} as {"from", "value"}, with these roles.
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
ROLES = ("system", "user", "assistant")
MAX_SHOWN = 3


class _Row(Protocol):
    @property
    def id(self) -> str: ...


Parsed = TypeVar("Parsed", bound=_Row)


@dataclass(frozen=True, eq=False)
class Message:
    """What one side said.

    The last three fields are those of an answer that a server gave, None where it did not tell them.

    Attributes:
        output_ids: int32, the tokens as they were generated, the end token included if there was one.
        finish_reason: "stop" for an answer that ended by itself, "length" for one that was cut.
        prompt_tokens: length of the prompt as the server tokenised it.
    """

    role: str
    content: str
    output_ids: np.ndarray | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As in a file, absent fields left out."""
        stored: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.output_ids is not None:
            stored["output_ids"] = self.output_ids.tolist()
        if self.finish_reason is not None:
            stored["finish_reason"] = self.finish_reason
        if self.prompt_tokens is not None:
            stored["prompt_tokens"] = self.prompt_tokens
        return stored


@dataclass(frozen=True)
class Conversation:
    """A system message or none, then user and assistant in turn; the last message is an answer."""

    id: str
    messages: tuple[Message, ...]

    def to_dict(self) -> dict[str, Any]:
        """As in a file."""
        return {"id": self.id, "conversations": [message.to_dict() for message in self.messages]}


@dataclass(frozen=True)
class Prompt:
    """What to ask: the user's turns, each after the answer to the one before it."""

    id: str
    system: str | None
    turns: tuple[str, ...]

    @property
    def opening(self) -> tuple[Message, ...]:
        """The messages before the first turn."""
        return () if self.system is None else (Message("system", self.system),)


@dataclass(frozen=True)
class Line:
    """One line of a file that is not empty; `number` counts from 1, empty lines included."""

    path: Path
    number: int
    content: bytes


@dataclass(frozen=True)
class Refusal:
    """A line that is not what it should be."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}"


@dataclass
class RowReader(Generic[Parsed]):
    """The rows of files in order, each checked; refused lines are collected instead of raised.

    `parse` turns a JSON object into a row with an `id`, or raises a ValueError that says what is wrong.
    Iterating reads the files anew. After the last row it is checked that few enough lines were refused.

    Attributes:
        num_lines: lines read so far that are not empty.
        refusals: of them, those refused.
    """

    paths: Sequence[Path]
    parse: Callable[[Mapping[str, Any]], Parsed]
    max_refused_share: float = MAX_REFUSED_SHARE
    num_lines: int = field(default=0, init=False)
    refusals: list[Refusal] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.max_refused_share <= 1:
            raise ValueError(f"max_refused_share is {self.max_refused_share}, allowed are 0 to 1")

    def __iter__(self) -> Iterator[Parsed]:
        """The rows.

        Raises:
            ValueError: a file is missing or damaged, there are no rows, or a larger share of them than
                `max_refused_share` is bad.
        """
        for _line, row in self.with_lines():
            yield row

    def with_lines(self) -> Iterator[tuple[Line, Parsed]]:
        """The rows, each with the line it came from."""
        self.num_lines, self.refusals = 0, []
        seen: set[str] = set()
        for path in self.paths:
            with closing(read_lines(path)) as lines:
                for line in lines:
                    self.num_lines += 1
                    try:
                        row = self.parse(_json_object(line.content))
                        if row.id in seen:
                            raise ValueError(f"id {row.id!r} was seen before")
                    except ValueError as error:
                        self.refusals.append(Refusal(path, line.number, str(error)))
                        continue
                    seen.add(row.id)
                    yield line, row
        self._check()

    def _check(self) -> None:
        names = ", ".join(map(str, self.paths))
        if self.num_lines == 0:
            raise ValueError(f"no rows in {names}")
        if len(self.refusals) > self.max_refused_share * self.num_lines:
            shown = "".join(f"\n  {refusal}" for refusal in self.refusals[:MAX_SHOWN])
            more = len(self.refusals) - MAX_SHOWN
            shown += f"\n  and {more} more" if more > 0 else ""
            raise ValueError(
                f"{len(self.refusals)} of {self.num_lines} rows of {names} are malformed, allowed is a share "
                f"of {self.max_refused_share:g}:{shown}"
            )


def read_conversations(*paths: Path, max_refused_share: float = MAX_REFUSED_SHARE) -> RowReader[Conversation]:
    """A reader of conversations with the target's answers."""
    return RowReader(paths, parse_conversation, max_refused_share)


def read_prompts(*paths: Path, max_refused_share: float = MAX_REFUSED_SHARE) -> RowReader[Prompt]:
    """A reader of prompts."""
    return RowReader(paths, parse_prompt, max_refused_share)


def read_lines(path: Path) -> Generator[Line, None, None]:
    """The lines of a .jsonl or .jsonl.gz file that are not empty.

    Raises:
        ValueError: there is no such file, it has another ending, or its compressed data is damaged.
    """
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"{path} must end in .jsonl or .jsonl.gz")
    if not path.is_file():
        raise ValueError(f"no file {path}")
    number = 0
    try:
        # Bytes, since text would be split at separators inside JSON strings.
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, content in enumerate(file, start=1):
                if content.strip():
                    yield Line(path, number, content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is damaged after line {number} ({error}): make or fetch it again"
        ) from error


def parse_conversation(row: Mapping[str, Any]) -> Conversation:
    """A conversation that ends with an answer.

    Raises:
        ValueError: something is missing, empty or of another type, or the roles are out of order.
    """
    messages = _messages(row, "conversations")
    if messages[-1].role != "assistant":
        raise ValueError(
            f"the last message must be an answer of the assistant, it is the {messages[-1].role}'s"
        )
    return Conversation(_row_id(row), messages)


def parse_prompt(row: Mapping[str, Any]) -> Prompt:
    """A prompt in any of its forms.

    Raises:
        ValueError: as for `parse_conversation`, or the row has none or several of the forms.
    """
    forms = [form for form in ("messages", "conversations", "prompt", "turns") if row.get(form) is not None]
    if len(forms) != 1:
        found = " and ".join(forms) or "none"
        raise ValueError(f"one of messages, conversations, prompt and turns is needed, it has {found}")
    row_id, form = _row_id(row), forms[0]
    if form == "prompt":
        return Prompt(row_id, None, (_text(row[form], form),))
    if form == "turns":
        turns = row[form]
        if not isinstance(turns, list) or not turns:
            raise ValueError("turns must be a list of texts that is not empty")
        return Prompt(row_id, None, tuple(_text(turn, f"turns[{i}]") for i, turn in enumerate(turns)))
    messages = _messages(row, form)
    system = messages[0].content if messages[0].role == "system" else None
    turns = tuple(message.content for message in messages if message.role == "user")
    return Prompt(row_id, system, turns)


def _json_object(content: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(content)
    except RecursionError as error:
        raise ValueError("not valid JSON (nested too deeply)") from error
    except ValueError as error:  # also of bytes that are not UTF-8
        raise ValueError(f"not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, it is {type(row).__name__}")
    return row


def _row_id(row: Mapping[str, Any]) -> str:
    row_id = row.get("id")
    if isinstance(row_id, int) and not isinstance(row_id, bool):
        return str(row_id)
    return _text(row_id, "id")


def _messages(row: Mapping[str, Any], name: str) -> tuple[Message, ...]:
    given = row.get(name)
    if not isinstance(given, list) or not given:
        raise ValueError(f"{name} must be a list of messages that is not empty")
    messages = tuple(_message(message, f"{name}[{i}]") for i, message in enumerate(given))
    first = int(messages[0].role == "system")
    for i, message in enumerate(messages[first:], start=first):
        expected = "assistant" if (i - first) % 2 else "user"
        if message.role != expected:
            raise ValueError(f"{name}[{i}] must be the {expected}'s, it is the {message.role}'s")
    if first == len(messages):
        raise ValueError(f"{name} has only a system message")
    return messages


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise ValueError(f"{where} must be an object with role and content, it is {type(given).__name__}")
    if "role" not in given and "from" in given:
        role = SHAREGPT_ROLES.get(str(given["from"]))
        if role is None:
            raise ValueError(f"{where}.from is {given['from']!r}, allowed are {', '.join(SHAREGPT_ROLES)}")
        return Message(role, _text(given.get("value"), f"{where}.value"))
    if given.get("role") not in ROLES:
        raise ValueError(f"{where}.role is {given.get('role')!r}, allowed are {', '.join(ROLES)}")
    return Message(
        role=given["role"],
        content=_text(given.get("content"), f"{where}.content"),
        output_ids=_output_ids(given.get("output_ids"), f"{where}.output_ids"),
        finish_reason=_optional(given.get("finish_reason"), str, f"{where}.finish_reason"),
        prompt_tokens=_optional(given.get("prompt_tokens"), int, f"{where}.prompt_tokens"),
    )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} must be a text, it is {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{where} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair: JSON can spell it, UTF-8 cannot
        raise ValueError(f"{where} is not valid Unicode ({error.reason})") from error
    return value


def _optional(value: Any, kind: type, where: str) -> Any:
    if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
        return value
    raise ValueError(f"{where} must be {kind.__name__}, it is {type(value).__name__}")


def _output_ids(value: Any, where: str) -> np.ndarray | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
        raise ValueError(f"{where} must be a list of token ids that is not empty")
    if min(value) < 0 or max(value) > np.iinfo(np.int32).max:
        raise ValueError(f"{where} holds {min(value)} to {max(value)}, which are no token ids")
    return np.array(value, dtype=np.int32)
