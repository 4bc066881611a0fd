"""Rows of conversations to examples: chat template, limits, and an account of every answer that is not used.

Each answer of the assistant becomes an example of its own, behind everything said before it: they are all the
target's. Knows no files; the order of what comes out is that of what goes in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import jinja2
import numpy as np

from train.chat_format import ChatFormat
from train.conversations import Conversation, Line, Message
from train.dataset import Example
from train.token_account import TokenAccount

MIN_RESPONSE = 2  # one to predict from, one to predict
ROWS_AT_ONCE = 512  # tokenised together
# Text and ids of the first so many finished answers are compared. No larger share may differ; some may, since
# a server can leave something out of its text.
CHECKED_ANSWERS = 64
MAX_OTHER_TEXT = 0.5


@dataclass(frozen=True)
class Limits:
    """What an example may hold.

    Attributes:
        max_length: tokens of prompt and response together; longer responses are cut.
        mask_token_id: the drafter's, which must not occur.
    """

    max_length: int
    mask_token_id: int

    def __post_init__(self) -> None:
        if self.max_length <= MIN_RESPONSE:
            raise ValueError(f"max_length is {self.max_length}, allowed are {MIN_RESPONSE + 1} and more")


@dataclass(frozen=True)
class _Answer:
    """One answer of a row, and the text of its prompt."""

    id: str
    where: str
    prompt_text: str
    message: Message

    @property
    def finished(self) -> bool:
        return self.message.finish_reason != "length"


class Tokeniser:
    """Makes examples of rows; `account` says what it did so far."""

    def __init__(self, chat_format: ChatFormat, limits: Limits) -> None:
        self.account = TokenAccount()
        self._format = chat_format
        self._limits = limits
        self._unchecked = CHECKED_ANSWERS

    def examples(self, rows: Iterable[tuple[Line, Conversation]]) -> Iterator[Example]:
        """The examples of all rows.

        Raises:
            ValueError: a row holds the mask token or ids that the tokenizer does not have, or the answers'
                texts are not those of their ids.
        """
        source = iter(rows)
        while chunk := list(islice(source, ROWS_AT_ONCE)):
            yield from self._of_rows(chunk)

    def _of_rows(self, rows: Sequence[tuple[Line, Conversation]]) -> Iterator[Example]:
        answers = [answer for line, row in rows for answer in self._answers(line, row)]
        self._check_texts(answers)
        prompts = self._format.encode([answer.prompt_text for answer in answers]) if answers else []
        untold = [answer for answer in answers if answer.message.output_ids is None]
        texts = self._format.encode([answer.message.content for answer in untold]) if untold else []
        from_text = iter(texts)
        for answer, prompt in zip(answers, prompts, strict=True):
            given = answer.message.output_ids
            response = next(from_text) if given is None else given.tolist()
            if answer.finished and (not response or response[-1] not in self._format.end_ids):
                response.append(self._format.turn_end_id)
            example = self._limited(answer, prompt, response)
            if example is not None:
                yield example

    def _answers(self, line: Line, row: Conversation) -> list[_Answer]:
        turns = [i for i, message in enumerate(row.messages) if message.role == "assistant"]
        found = []
        for number, i in enumerate(turns, start=1):
            name = row.id if len(turns) == 1 else f"{row.id}#{number}"
            where = f"row {row.id!r} ({line.path}, line {line.number})"
            self.account = self.account.plus(answers=1)
            try:
                text = self._format.prompt_text(row.messages[:i])
            except jinja2.TemplateError as error:
                self._drop("template", f"{where}: the chat template refuses it ({error})")
                continue
            found.append(_Answer(name, where, text, row.messages[i]))
        return found

    def _limited(self, answer: _Answer, prompt: list[int], response: list[int]) -> Example | None:
        self._check_ids(answer, prompt, response)
        told, room = answer.message.prompt_tokens, self._limits.max_length - len(prompt)
        if told is not None and told != len(prompt):
            reason = f"the server saw {told} prompt tokens, the chat template here gives {len(prompt)}"
            return self._drop("template", f"{answer.where}: {reason}")
        if len(response) < MIN_RESPONSE:
            return self._drop("short_response", f"{answer.where}: a response of {len(response)} tokens")
        if room < MIN_RESPONSE:
            reason = f"a prompt of {len(prompt)} tokens, max_length is {self._limits.max_length}"
            return self._drop("long_prompt", f"{answer.where}: {reason}")
        self.account = self.account.plus(
            examples=1,
            truncated=len(response) > room,
            unfinished=not answer.finished,
            retokenised=answer.message.output_ids is None,
            prompt_tokens=len(prompt),
            response_tokens=min(len(response), room),
        )
        return Example(answer.id, np.array(prompt, np.int32), np.array(response[:room], np.int32))

    def _drop(self, reason: str, note: str) -> None:
        self.account = self.account.plus(**{reason: 1}, note=note)

    def _check_ids(self, answer: _Answer, prompt: list[int], response: list[int]) -> None:
        mask = self._limits.mask_token_id
        for name, ids in (("prompt", prompt), ("response", response)):
            if mask in ids:
                raise ValueError(
                    f"{answer.where}: its {name} holds the mask token {mask} at position {ids.index(mask)}, "
                    "which must not occur in the data: remove the row, or choose another mask token"
                )
        if max(response, default=0) >= self._format.num_ids:
            raise ValueError(
                f"{answer.where}: its response holds token {max(response)}, the tokenizer has "
                f"{self._format.num_ids}: the answers come from a target with other tokens"
            )

    def _check_texts(self, answers: Sequence[_Answer]) -> None:
        """Equal ids of two tokenizers are different texts: notice before anything is trained on them."""
        told = [(one, one.message.output_ids) for one in answers if one.finished]
        chosen = [(one, ids) for one, ids in told if ids is not None][: self._unchecked]
        if not chosen or self._format.thinking:  # the text of an answer that thought is a part of its ids'
            return
        texts = self._format.decode([ids for _one, ids in chosen])
        self._unchecked -= len(chosen)
        pairs = zip(chosen, texts, strict=True)
        other = [one.where for (one, _), text in pairs if one.message.content.strip() != text.strip()]
        if len(other) > MAX_OTHER_TEXT * len(chosen):
            raise ValueError(
                f"{len(other)} of {len(chosen)} answers are not the text of their token ids, the first: "
                f"{other[0]}. They come from a target with another tokenizer, or from one that thinks"
            )
