"""One regeneration: which prompts are still to ask, the files around the answers, and the account of both.

Every prompt ends in one of three files: answers.jsonl, answers_error.jsonl (no usable answer) or
answers_skipped.jsonl (malformed, never asked); the three add up to the prompts. Knows no command line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from train.asking import Asking, Listener, Patience
from train.conversations import (
    MAX_REFUSED_SHARE,
    Conversation,
    Prompt,
    RowReader,
    parse_conversation,
    read_prompts,
)
from train.endpoints import Endpoint, Question
from train.row_file import RowFile, write_whole

# So many refusals and not one answer: it is the request that is wrong, not the prompts.
MAX_REFUSED_FIRST = 20


@dataclass(frozen=True)
class Plan:
    """What to ask.

    Attributes:
        limit: only the first so many prompts; malformed rows are then neither counted nor skipped.
        spread: the same, spread evenly over the file, which may be sorted by topic.
    """

    prompts: Path
    out: Path
    question: Question
    limit: int | None = None
    spread: int | None = None
    max_refused_share: float = MAX_REFUSED_SHARE

    def __post_init__(self) -> None:
        if self.out.suffix != ".jsonl":
            raise ValueError(
                f"out is {self.out}: it must end in .jsonl (rows are appended, compress it after)"
            )
        for name in ("limit", "spread"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, allowed are 1 and more")
        if self.limit is not None and self.spread is not None:
            raise ValueError("limit and spread are given: leave out one")

    def beside(self, what: str) -> Path:
        """The file next to the answers that holds something else."""
        return self.out.with_name(f"{self.out.stem}_{what}{'.json' if what == 'settings' else '.jsonl'}")


@dataclass(frozen=True)
class Account:
    """What became of the prompts; `open` ones were not asked yet or have to be asked again.

    Attributes:
        cut: answers that reached max_tokens.
        without_ids: answers of which the endpoint gave no token ids.
    """

    prompts: int
    success: int = 0
    error: int = 0
    skipped: int = 0
    cut: int = 0
    without_ids: int = 0
    tokens: int = 0

    @property
    def open(self) -> int:
        return self.prompts - self.success - self.error - self.skipped

    def with_answer(self, conversation: Conversation) -> Account:
        """One more answered prompt."""
        answers = [message for message in conversation.messages if message.role == "assistant"]
        ids = [answer.output_ids for answer in answers if answer.output_ids is not None]
        return replace(
            self,
            success=self.success + 1,
            cut=self.cut + any(answer.finish_reason == "length" for answer in answers),
            without_ids=self.without_ids + (len(ids) < len(answers)),
            tokens=self.tokens + sum(map(len, ids)),
        )

    def __str__(self) -> str:
        parts = f"{self.success} answered + {self.error} errors + {self.skipped} skipped"
        if self.open:
            parts += f" + {self.open} still to ask"
        return f"{parts} = {self.prompts} prompts; {self.cut} cut, {self.without_ids} without token ids"


class Regeneration:
    """One run of a plan: the prompts still to ask, the files, and the account."""

    def __init__(self, plan: Plan) -> None:
        """Read prompts and earlier answers, of which a half-written last line is dropped.

        Raises:
            ValueError: the prompts cannot be read, or the earlier answers are of another plan.
        """
        self._plan = plan
        reader = read_prompts(plan.prompts, max_refused_share=plan.max_refused_share)
        prompts = _selected(list(reader), plan)
        whole = plan.limit is None and plan.spread is None
        self._skipped = [
            {"line": refusal.line, "reason": refusal.reason} for refusal in (reader.refusals if whole else ())
        ]
        self.account = Account(prompts=len(prompts) + len(self._skipped), skipped=len(self._skipped))
        self._check_settings()
        done = self._read_answers({prompt.id: prompt for prompt in prompts})
        self.to_ask = [prompt for prompt in prompts if prompt.id not in done]
        self.num_before = len(done)

    async def run(
        self,
        endpoints: Sequence[Endpoint],
        *,
        at_once: int,
        patience: Patience,
        warn: Callable[[str], None],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Ask what is still to ask.

        Raises:
            EndpointsLostError: no endpoint is left; what was answered is in the files.
            ValueError: nothing but refusals.
            OSError: a file cannot be written; what was answered before is in it.
        """
        plan = self._plan
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in self._skipped]
        with RowFile(plan.out) as answers, RowFile(plan.beside("error"), fresh=True) as errors:
            write_whole(plan.beside("skipped"), "".join(lines).encode())
            write_whole(plan.beside("settings"), json.dumps(self._settings(), indent=2).encode() + b"\n")

            def answered(conversation: Conversation) -> None:
                answers.append(conversation.to_dict())
                self.account = self.account.with_answer(conversation)
                on_change()

            def refused(prompt: Prompt, reason: str) -> None:
                errors.append({"id": prompt.id, "error": reason})
                self.account = replace(self.account, error=self.account.error + 1)
                on_change()
                if not self.account.success and self.account.error >= MAX_REFUSED_FIRST:
                    raise ValueError(f"the first {MAX_REFUSED_FIRST} prompts were all refused: {reason}")

            asking = Asking(
                endpoints,
                plan.question,
                at_once=at_once,
                patience=patience,
                listener=Listener(answered, refused, warn),
            )
            await asking.run(self.to_ask)
        assert self.account.open == 0, f"prompts were lost: {self.account}"

    def _settings(self) -> dict[str, Any]:
        return asdict(self._plan.question)

    def _check_settings(self) -> None:
        """Answers of two kinds in one file would be neither."""
        path = self._plan.beside("settings")
        if not path.is_file() or not self._plan.out.is_file():
            return
        earlier = json.loads(path.read_text(encoding="utf-8"))
        ours = self._settings()
        different = [
            f"{name} {earlier.get(name)} before, {ours[name]} now"
            for name in ours
            if earlier.get(name) != ours[name]
        ]
        if different:
            raise ValueError(
                f"{self._plan.out} holds answers to other settings ({'; '.join(different)}): give the same "
                "settings, or another --out"
            )

    def _read_answers(self, prompts: Mapping[str, Prompt]) -> set[str]:
        """Ids answered before; also checks that they are answers to these very prompts."""
        path = self._plan.out
        if not path.is_file():
            return set()
        RowFile(path).close()  # drops a half-written last line
        if path.stat().st_size == 0:
            return set()
        reader = RowReader([path], parse_conversation, max_refused_share=0.0)
        done: set[str] = set()
        for conversation in reader:
            asked = [(one.role, one.content) for one in conversation.messages if one.role != "assistant"]
            prompt = prompts.get(conversation.id)
            if prompt is None or asked != _asked(prompt):
                raise ValueError(
                    f"{path} has an answer to {conversation.id!r}, which is not in {self._plan.prompts} "
                    "(or among the prompts chosen of it) or asks something else there: give another --out"
                )
            done.add(conversation.id)
            self.account = self.account.with_answer(conversation)
        return done


def _asked(prompt: Prompt) -> list[tuple[str, str]]:
    opening = [(message.role, message.content) for message in prompt.opening]
    return [*opening, *(("user", turn) for turn in prompt.turns)]


def _selected(prompts: list[Prompt], plan: Plan) -> list[Prompt]:
    wanted = plan.limit or plan.spread
    if wanted is None:
        return prompts
    if wanted > len(prompts):
        raise ValueError(f"{wanted} prompts wanted of {plan.prompts}, it has {len(prompts)}")
    if plan.limit is not None:
        return prompts[:wanted]
    return [prompts[i * len(prompts) // wanted] for i in range(wanted)]
