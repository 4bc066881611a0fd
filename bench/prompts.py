"""The benchmark sets on disk, and prompts as token ids.

A set is a file NAME.jsonl or NAME.jsonl.gz with one conversation a line: `prompt`, or `turns` where a set has
several user turns. The folder is given by the caller, else by D3D_BENCH_DATA, else it lies next to the
checkout. Talks to no server.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA_ENV = "D3D_BENCH_DATA"
_BESIDE_CHECKOUT = Path(__file__).resolve().parents[2] / "shared" / "data" / "bench"

Message = Mapping[str, str]


@dataclass(frozen=True)
class Conversation:
    """The user's turns of one benchmark row; a later turn needs an answer to the one before it."""

    name: str
    turns: tuple[str, ...]


def data_folder(given: str | None) -> Path:
    """Where the benchmark sets are.

    Raises:
        ValueError: there is no such folder.
    """
    folder = Path(given or os.environ.get(DATA_ENV) or _BESIDE_CHECKOUT)
    if not folder.is_dir():
        raise ValueError(f"no folder of benchmark sets at {folder}: give one with --data or {DATA_ENV}")
    return folder


def read_set(folder: Path, name: str, *, count: int | None = None) -> list[Conversation]:
    """Conversations of set `name`: all, or `count` of them spread evenly over the file.

    Sets are sorted by topic here and there, so the first rows would be of one kind.

    Raises:
        ValueError: the set is missing, shorter than `count`, or has a row of another form.
    """
    rows = _read_lines(folder, name)
    conversations = [_conversation(row, where=f"{name}, row {i}") for i, row in enumerate(rows)]
    if count is None:
        return conversations
    if not 1 <= count <= len(conversations):
        raise ValueError(f"{count} prompts wanted of {name}, allowed are 1 to {len(conversations)}")
    return [conversations[i * len(conversations) // count] for i in range(count)]


def chat_ids(tokenizer: Any, messages: Sequence[Message]) -> tuple[int, ...]:
    """Token ids of a conversation, ready for the assistant's turn."""
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def user(content: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """A message of the model."""
    return {"role": "assistant", "content": content}


def _read_lines(folder: Path, name: str) -> list[Any]:
    plain, packed = folder / f"{name}.jsonl", folder / f"{name}.jsonl.gz"
    if plain.is_file():
        text = plain.read_text(encoding="utf-8")
    elif packed.is_file():
        text = gzip.decompress(packed.read_bytes()).decode("utf-8")
    else:
        raise ValueError(f"no benchmark set {name!r} in {folder}: neither {plain.name} nor {packed.name}")
    # Not splitlines(): JSON strings may hold separators that it would split at.
    return [json.loads(line) for line in text.split("\n") if line]


def _conversation(row: Any, *, where: str) -> Conversation:
    turns = row.get("turns") or [row.get("prompt")]
    if not isinstance(row.get("id"), str) or not all(isinstance(turn, str) for turn in turns):
        raise ValueError(f"{where}: needs a text `id` and either a text `prompt` or `turns`, a list of texts")
    return Conversation(name=row["id"], turns=tuple(turns))
