"""Greedy answers of a server as token ids: asked for over HTTP, kept on disk, compared.

A question is a prompt in token ids, so every server sees the same prompt whatever it does to text. Knows
neither benchmark sets nor how a server is started.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

# Two greedy runs may differ where the target's two best tokens are this close (in nats): batches of other
# shapes are summed in another order, which moves fp32 logprobs by about 1e-5; wrong tokens are off by far
# more.
TIE_GAP = 1e-3
TIMEOUT_S = 600.0

# The two most likely tokens at a position, the likeliest first: ((logprob, id), (logprob, id)).
TopTwo = tuple[tuple[float, int], tuple[float, int]]


@dataclass(frozen=True)
class Question:
    """A prompt with a name."""

    name: str
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What a server said.

    Attributes:
        top_two: for every output position; empty unless asked for.
        accept_histogram: entry k counts the rounds that accepted k candidates; empty on a plain server.
    """

    name: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    top_two: tuple[TopTwo, ...]
    accept_histogram: tuple[int, ...]

    @property
    def question(self) -> Question:
        return Question(self.name, self.prompt_ids)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Answer:
        """Inverse of `dataclasses.asdict`, through JSON."""
        return cls(
            name=stored["name"],
            prompt_ids=tuple(stored["prompt_ids"]),
            output_ids=tuple(stored["output_ids"]),
            top_two=tuple((tuple(first), tuple(second)) for first, second in stored["top_two"]),
            accept_histogram=tuple(stored["accept_histogram"]),
        )


@dataclass(frozen=True)
class Comparison:
    """An answer beside the plain server's.

    Attributes:
        position: the first differing output position, None if the answers are identical.
        gap: the plain target's top-2 logprob gap there, if the two tokens are its top two.
    """

    name: str
    position: int | None
    gap: float | None

    @property
    def identical(self) -> bool:
        return self.position is None

    @property
    def excused(self) -> bool:
        """Whether the answers part at a tie: either token is then a greedy choice."""
        return self.gap is not None and self.gap < TIE_GAP


class AnswerStore:
    """Answers of one server in one mode, each in a file of its own so that an interruption loses none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, question: Question) -> Answer | None:
        """The stored answer to exactly this prompt, if there is one."""
        path = self._path(question.name)
        if not path.is_file():
            return None
        answer = Answer.from_dict(json.loads(path.read_text()))
        return answer if answer.question == question else None

    def add(self, answer: Answer) -> None:
        """Keep an answer, in place of an earlier one of that name."""
        path = self._path(answer.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(asdict(answer)))
        unfinished.replace(path)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def ask(client: httpx.Client, question: Question, *, num_tokens: int, top_two: bool = False) -> Answer:
    """The server's greedy answer of up to `num_tokens` tokens.

    Raises:
        httpx.HTTPStatusError: the server refused the request or failed.
    """
    request: dict[str, Any] = {
        "input_ids": question.prompt_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": num_tokens},
    }
    if top_two:
        request |= {"return_logprob": True, "top_logprobs_num": 2}
    response = client.post("/generate", json=request, timeout=TIMEOUT_S).raise_for_status().json()
    meta = response["meta_info"]
    return Answer(
        name=question.name,
        prompt_ids=question.prompt_ids,
        output_ids=tuple(response["output_ids"]),
        top_two=tuple(_top_two(position) for position in meta["output_top_logprobs"]) if top_two else (),
        accept_histogram=tuple(meta.get("spec_correct_drafts_histogram", ())),
    )


def ask_all(
    url: str,
    questions: Sequence[Question],
    *,
    num_tokens: int,
    at_once: int,
    top_two: bool = False,
    on_answer: Callable[[Answer], None] = lambda _answer: None,
) -> list[Answer]:
    """Answers in the order of `questions`, with `at_once` requests running at any time.

    A request starts when another ends, so rows join and leave the server's batch in the middle of others.
    """
    with httpx.Client(base_url=url, limits=httpx.Limits(max_connections=at_once)) as client:
        with ThreadPoolExecutor(at_once) as pool:
            asked = [
                pool.submit(ask, client, question, num_tokens=num_tokens, top_two=top_two)
                for question in questions
            ]
            try:
                for done in as_completed(asked):
                    on_answer(done.result())
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return [done.result() for done in asked]


def compare(plain: Answer, other: Answer) -> Comparison:
    """Where two answers to one question part, and whether the plain target was undecided there.

    `plain` must have been asked for with `top_two`. A difference in length alone is never a tie.
    """
    assert plain.question == other.question, f"{plain.name} and {other.name} answer different questions"
    ours, theirs = plain.output_ids, other.output_ids
    if ours == theirs:
        return Comparison(plain.name, position=None, gap=None)
    shared = min(len(ours), len(theirs))
    position = next((i for i in range(shared) if ours[i] != theirs[i]), shared)
    if position == shared:
        return Comparison(plain.name, position=position, gap=None)
    (first, first_id), (second, second_id) = plain.top_two[position]
    undecided = {first_id, second_id} == {ours[position], theirs[position]}
    return Comparison(plain.name, position=position, gap=first - second if undecided else None)


def _top_two(position: list[list[Any]]) -> TopTwo:
    first, second = ((float(entry[0]), int(entry[1])) for entry in position)
    return first, second
