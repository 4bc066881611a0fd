"""Asking a server the cases, and holding its replies against the plain server's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.answers import Answer, TopTwo, compare
from serve.launch import ServerProcess
from tests.e2e.cases import Case
from tests.e2e.scripted.round_log import LoggedRound, read_rounds
from tests.e2e.scripted.script import Script

# Of a thousand candidates one may differ: batches of other shapes are summed in another order, and an
# untrained drafter is undecided now and then. A row that reads another row's tokens differs in many. Of fewer
# than a thousand none may differ.
MAX_OTHER_CANDIDATES = 1e-3


@dataclass(frozen=True)
class Reply:
    """What a server said to a case."""

    case: Case
    raw: dict[str, Any]

    def cut(self, num_tokens: int) -> Reply:
        """The reply to the same request with a lower limit, as far as its tokens go."""
        return Reply(self.case, {**self.raw, "output_ids": self.output_ids[:num_tokens]})

    @property
    def output_ids(self) -> list[int]:
        return list(self.raw["output_ids"])

    @property
    def text(self) -> str:
        return str(self.raw["text"])

    @property
    def meta(self) -> dict[str, Any]:
        return dict(self.raw["meta_info"])

    @property
    def ended_by(self) -> str:
        """`stop` or `length`."""
        return str(self.meta["finish_reason"]["type"])

    @property
    def histogram(self) -> list[int]:
        """Entry k counts the rounds that accepted k candidates."""
        return list(self.meta.get("spec_correct_drafts_histogram", []))

    def answer(self) -> Answer:
        """As `bench.answers` compares it."""
        return Answer(
            name=self.case.name,
            prompt_ids=self.case.prompt_ids,
            output_ids=tuple(self.output_ids),
            top_two=tuple(_top_two(position) for position in self.meta.get("output_top_logprobs") or ()),
            accept_histogram=tuple(self.histogram),
        )


@dataclass(frozen=True)
class Asked:
    """A reply, the rounds behind it, and how many prompt tokens the drafter had to read for it."""

    reply: Reply
    rounds: list[LoggedRound]
    num_read: int


@dataclass(frozen=True)
class RunningServer:
    """A server under test, and the files a test looks into."""

    name: str
    process: ServerProcess
    rounds_file: Path | None = None
    script: Script | None = None
    _asked: dict[str, Asked] = field(default_factory=dict)  # by case

    def ask(self, case: Case, **fields: Any) -> Reply:
        """The server's reply; `fields` are added to the request."""
        raw = self.process.generate(
            case.prompt_ids, sampling=case.sampling_params, **{**case.fields, **fields}
        )
        return Reply(case, raw)

    def ask_together(self, cases: Sequence[Case], *, at_once: int, **fields: Any) -> list[Reply]:
        """Replies in the order of `cases`, with `at_once` requests running at any time."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda case: self.ask(case, **fields), cases))

    def ask_logged(self, case: Case) -> Asked:
        """As `ask`, alone on the server, with what the server wrote down."""
        before, read_before = len(self.rounds()), self.tokens_read()
        reply = self.ask(case)
        return Asked(reply, rounds_of(reply, self.rounds()[before:]), self.tokens_read() - read_before)

    def ask_once(self, case: Case) -> Asked:
        """As `ask_logged`, or what came of it before: for tests that look at one answer in several ways."""
        if case.name not in self._asked:
            self._asked[case.name] = self.ask_logged(case)
        return self._asked[case.name]

    def rounds(self) -> list[LoggedRound]:
        """All rounds so far, one entry per row."""
        assert self.rounds_file is not None, f"server {self.name} does not log rounds"
        return read_rounds(self.rounds_file) if self.rounds_file.exists() else []

    def state(self) -> dict[str, Any]:
        """What `/d3d/state` says of the one worker."""
        (state,) = self.process.request("GET", "/d3d/state").json()["workers"]
        return dict(state)

    def tokens_read(self) -> int:
        """Prompt tokens whose K/V the drafter has computed since the server started."""
        return int(self.state()["pages"]["recomputed_tokens"])

    def log(self) -> str:
        return self.process.log.read_text(errors="replace")


def same_tokens(plain: Reply, reply: Reply) -> bool:
    """Fail if a reply's tokens are not the plain server's; False where they part at a tie."""
    comparison = compare(plain.answer(), reply.answer())
    if comparison.excused:
        warnings.warn(f"{plain.case}: a tie at position {comparison.position}", stacklevel=2)
    assert comparison.identical or comparison.excused, (
        f"{plain.case}: differs at {comparison.position} (gap {comparison.gap}):\n"
        f"  plain {plain.output_ids} {plain.text!r}\n  D3D   {reply.output_ids} {reply.text!r}"
    )
    return comparison.identical


def same_reply(plain: Reply, reply: Reply) -> bool:
    """As `same_tokens`, and text and reason of the end are the plain server's too."""
    if not same_tokens(plain, reply):
        return False
    assert reply.text == plain.text
    assert reply.meta["finish_reason"] == plain.meta["finish_reason"]
    return True


def same_drafts(ours: Sequence[LoggedRound], theirs: Sequence[LoggedRound]) -> None:
    """Rounds of the same answer propose the same, wherever the rows were and whoever was beside them."""
    assert [one.committed_len for one in ours] == [one.committed_len for one in theirs]
    assert [one.prop_len for one in ours] == [one.prop_len for one in theirs]
    pairs = [
        pair
        for one, other in zip(ours, theirs, strict=True)
        for pair in zip(one.block[: 1 + one.prop_len], other.block[: 1 + one.prop_len], strict=True)
    ]
    different = sum(one != other for one, other in pairs)
    assert different <= MAX_OTHER_CANDIDATES * len(pairs), f"{different} of {len(pairs)} candidates differ"


def rounds_of(reply: Reply, rounds: Sequence[LoggedRound]) -> list[LoggedRound]:
    """The rounds behind a reply, out of those logged while it was made; not for retracted requests.

    A request that has ended is in one more round, whose result nobody reads: it is left out.
    """
    if len(reply.output_ids) == 1:
        return []  # the prefill's
    by_row: dict[int, list[LoggedRound]] = {}
    for one in rounds:
        by_row.setdefault(one.row, []).append(one)
    starts = [mine[i:] for mine in by_row.values() for i in range(len(mine))]
    count = reply.meta["spec_verify_ct"]
    found = [later[:count] for later in starts if _makes(reply, later[:count])]
    assert found, f"{reply.case}: no row has its {count} rounds"
    # An earlier one can be the round that was left over by a request with the same prompt.
    return max(found, key=lambda mine: mine[0].number)


def _makes(reply: Reply, rounds: Sequence[LoggedRound]) -> bool:
    """Whether `rounds` of a row are those of a reply from its first one to its last."""
    tokens, length = [*reply.case.prompt_ids, *reply.output_ids], len(reply.case.prompt_ids)
    for one in rounds:
        added = [*one.block[: 1 + one.accept_len], one.bonus][: len(tokens) - length]
        if one.committed_len != length or not added or added != tokens[length : length + len(added)]:
            return False
        length += one.accept_len + 1
    return len(rounds) == reply.meta["spec_verify_ct"]


def _top_two(position: Sequence[Sequence[Any]]) -> TopTwo:
    # JSON has no infinity: what a grammar forbids comes as null.
    first, second = (
        (-math.inf if entry[0] is None else float(entry[0]), int(entry[1])) for entry in position[:2]
    )
    return first, second
