"""Conversations as token ids, exactly as the target's server sees and makes them.

A prompt is the target's chat template up to where the answer begins. A response is the ids that were
generated or, where a server did not tell them, the answer's text tokenised and the end token behind it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from train.conversations import Message

CONFIGS = ("generation_config.json", "config.json")
_PROBE = "The answer."


@dataclass(frozen=True)
class ChatFormat:
    """The tokenizer of a target, with its chat template and its end tokens.

    Attributes:
        thinking: whether the answers think first; the template is told.
        end_ids: the tokens that end an answer.
        turn_end_id: the one of them that the template writes after an answer.
    """

    tokenizer: PreTrainedTokenizerBase
    thinking: bool
    end_ids: frozenset[int]
    turn_end_id: int

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """The conversation so far, ready for the assistant's turn."""
        return self._render(messages, add_generation_prompt=True)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text; what looks like a special token is one, as in a server."""
        return self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]

    def decode(self, ids: Sequence[np.ndarray]) -> list[str]:
        """Texts without special tokens, as a server returns them."""
        return self.tokenizer.batch_decode(
            [one.tolist() for one in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    @cached_property
    def num_ids(self) -> int:
        """One more than the largest id the tokenizer knows."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Changes with anything that changes the tokens of a conversation."""
        content = {
            "tokenizer": self.tokenizer.backend_tokenizer.to_str(),
            "template": self.tokenizer.chat_template,
            "thinking": self.thinking,
            "end_ids": sorted(self.end_ids),
            "turn_end_id": self.turn_end_id,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        return _render(self.tokenizer, messages, self.thinking, add_generation_prompt=add_generation_prompt)


def read_chat_format(path: str | Path, *, thinking: bool = False) -> ChatFormat:
    """The chat format of a model folder.

    Raises:
        ValueError: it has no fast tokenizer or chat template, or no end token is known.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} has no tokenizer that can be read ({str(error).splitlines()[0]})"
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer of {path} is a slow one: its folder needs a tokenizer.json")
    if not tokenizer.chat_template:
        raise ValueError(f"{path} has no chat template: take the folder of the instruction-tuned target")
    end_ids = _end_ids(tokenizer, Path(path))
    if not end_ids:
        raise ValueError(f"no end token is known: {path} names none in its tokenizer, {' or '.join(CONFIGS)}")
    return ChatFormat(
        tokenizer=tokenizer,
        thinking=thinking,
        end_ids=frozenset(end_ids),
        turn_end_id=_turn_end_id(tokenizer, end_ids, thinking),
    )


def _end_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[int]:
    """The tokenizer's end token and those of the configs, as SGLang takes them together."""
    ids: list[int | None] = []
    for name in CONFIGS:
        given = _read_json(folder / name).get("eos_token_id")
        ids += given if isinstance(given, list) else [given]
    return [one for one in dict.fromkeys([*ids, tokenizer.eos_token_id]) if one is not None]


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from error
    return content if isinstance(content, dict) else {}


def _turn_end_id(tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int], thinking: bool) -> int:
    """The first end token after an answer in the template; the first known one if it writes none."""
    messages = [Message("user", _PROBE), Message("assistant", _PROBE)]
    whole = _render(tokenizer, messages, thinking, add_generation_prompt=False)
    rest = whole[whole.rindex(_PROBE) + len(_PROBE) :] if _PROBE in whole else ""
    written = tokenizer(rest, add_special_tokens=False)["input_ids"] if rest else []
    return next((one for one in written if one in end_ids), end_ids[0])


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    thinking: bool,
    *,
    add_generation_prompt: bool,
) -> str:
    text = tokenizer.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in messages],
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        enable_thinking=thinking,
    )
    assert isinstance(text, str)
    return text
