"""The identity bench: what it plans to run, what it counts, and that it sees what is missing or wrong."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench import identity, identity_runs
from bench.answers import Answer, Comparison, Question
from bench.identity_counts import Counts, Session, SessionStore, counts_of, outcomes, read_log
from bench.identity_metrics import AT_LEAST, Summary, metrics_of, shortcomings, summarise
from bench.identity_plan import (
    PLAIN,
    PLAIN_BATCH,
    REFERENCE,
    Run,
    Server,
    Settings,
    planned_runs,
    planned_servers,
)
from tests.e2e.scripted.round_log import LoggedRound
from tests.e2e.scripted.script import Script

BLOCK_SIZE = 16
SCRIPTED = Run(Server("scripted", "async", 4, 1, "sibling"), "one")
SYNC = Run(Server("cut", "sync"), "one")


def test_plan_covers_both_steps() -> None:
    full = {server.name: server.few for server in planned_servers(BLOCK_SIZE)}
    assert full == {
        "plain": False,
        "cut-sync": False,
        "scripted-sync": False,
        "cut-async-c4f1-redraft": False,
        "scripted-async-c16f2-redraft": False,
        "scripted-async-c4f1-sibling": False,
        "cut-async-c12f2-redraft": True,
        "cut-async-c12f2-sibling": True,
        "scripted-async-c12f2-redraft": True,
        "scripted-async-c12f2-sibling": True,
        "whole-sync": True,
        "whole-async-c4f1-redraft": True,
    }
    runs = planned_runs(Settings())
    assert runs[0] == REFERENCE and len(set(runs)) == len(runs) == 2 * len(full)


def test_scripted_runs_are_long_enough_for_what_must_occur() -> None:
    """As the script foretells it for as many answers as there are, of other tokens."""
    ids = random.Random(1)
    answers = [([1, i], ids.choices(range(1000, 40_000), k=64)) for i in range(48)]
    hits, misses, fulls = Counter[int](), Counter[int](), Counter[int]()
    for run in planned_runs(Settings(only=("scripted-async",))):
        server = run.server
        if server.few or server.miss != "redraft":
            continue
        for done in Script.of(answers).outcomes(
            block_size=BLOCK_SIZE, coverage=server.coverage, fanout=server.fanout
        ):
            counter = {"hit": hits, "miss": misses, "full": fulls}.get(done.leads_to, Counter())
            counter[done.accept_len] += 1
    assert hits.total() >= AT_LEAST["hits"]  # of misses the untrained drafter has plenty
    assert fulls.total() >= AT_LEAST["fulls"] and min(fulls[BLOCK_SIZE - 1], fulls[BLOCK_SIZE - 2]) >= 1
    assert set(hits) == set(misses) == set(range(BLOCK_SIZE - 1))


def test_flags_name_every_drafting_option() -> None:
    assert PLAIN.flags == ()
    assert Server("cut", "sync").flags == ("--d3d-mode", "sync")
    flags = Server("cut", "async", 12, 2, "sibling").flags
    assert dict(zip(flags[::2], flags[1::2], strict=True)) == {
        "--d3d-mode": "async",
        "--d3d-coverage": "12",
        "--d3d-fanout": "2",
        "--d3d-miss": "sibling",
    }


def test_coverage_never_exceeds_the_block() -> None:
    assert max(server.coverage for server in planned_servers(8)) == 8


def test_only_keeps_the_reference_and_what_is_named() -> None:
    runs = planned_runs(Settings(only=("cut-sync", "whole-async-c4f1-redraft-eight")))
    expected = ["plain-one", "cut-sync-one", "cut-sync-eight", "whole-async-c4f1-redraft-eight"]
    assert [str(run) for run in runs] == expected
    with pytest.raises(ValueError, match="no run is named 'tree'"):
        planned_runs(Settings(only=("cut", "tree")))


def logged(
    committed_len: int,
    accept_len: int,
    *,
    origin: str,
    row: int = 0,
    scene: int | None = 3,
    prop_len: int = 15,
) -> LoggedRound:
    return LoggedRound(
        number=0,
        row=row,
        scene=scene,
        committed_len=committed_len,
        block=[],
        prop_len=prop_len,
        accept_len=accept_len,
        bonus=0,
        origin=origin,
    )


def test_an_outcome_is_told_by_the_next_round_of_its_row() -> None:
    rounds = [
        logged(10, 2, origin="redraft"),
        logged(90, 5, origin="redraft", row=1),
        logged(13, 15, origin="hit"),  # so the outcome (2, .) was drafted ahead
        logged(29, 14, origin="full", prop_len=14),
        logged(96, 15, origin="sibling", row=1),  # and (5, .) was not
        logged(44, 14, origin="full", prop_len=14),
        logged(112, 0, origin="redraft", row=1),
        logged(59, 0, origin="redraft"),
    ]
    assert outcomes(rounds) == Counts(
        hits=Counter({2: 1}),
        misses=Counter({5: 1}),
        fulls=Counter({15: 1, 14: 1}),
        lost=Counter({15: 1, 14: 1}),
    )


@pytest.mark.parametrize(
    "later",
    [
        logged(14, 0, origin="hit"),  # another length: a new request in the row
        logged(13, 0, origin="hit", scene=4),
        logged(13, 0, origin="hit", row=1),
        logged(13, 0, origin="none"),
    ],
)
def test_rounds_that_do_not_follow_tell_nothing(later: LoggedRound) -> None:
    assert outcomes([logged(10, 2, origin="redraft"), later]) == Counts()
    unknown = [logged(10, 2, origin="redraft", scene=None), logged(13, 2, origin="hit", scene=None)]
    assert outcomes(unknown) == Counts()


def test_a_line_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    assert read_log(path) == []
    line = json.dumps(asdict(logged(10, 2, origin="hit")))
    path.write_text(f"{line}\n{line[:20]}")
    assert read_log(path) == [logged(10, 2, origin="hit")]


def test_counts_of_interrupted_sessions_add_up(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "one-sessions")
    assert store.all() == []
    first = store.new()
    state: dict[str, Any] = {"row_rounds_by_origin": {"hit": 2, "none": 0}, "fallbacks": {"out_of_pages": 1}}
    counts = counts_of(state, [logged(10, 2, origin="redraft"), logged(13, 2, origin="hit")])
    store.keep(first, Session(1, 1.0, Counts(), {}))
    store.keep(first, Session(3, 2.5, counts, {"mode": "async"}))
    second = store.new()
    assert second != first
    store.keep(second, Session(1, 1.0, counts, {"mode": "async"}))
    sessions = SessionStore(tmp_path / "one-sessions").all()
    assert sorted(session.num_answers for session in sessions) == [1, 3]
    total = sum((session.counts for session in sessions), Counts())
    assert total == Counts(origins=Counter(hit=4), fallbacks=Counter(out_of_pages=2), hits=Counter({2: 2}))
    assert total - counts == counts


def summary(run: Run, **fields: Any) -> Summary:
    plain = Summary(run, 2, 8, identical=2, excused=0, mismatches=0, accept_histogram=(), counts=Counts())
    return replace(plain, **fields)


def test_summary_counts_ties_apart_from_mismatches() -> None:
    answers = [
        Answer(str(i), (1,), (5, 6, 7), top_two=(), accept_histogram=(1, 0, 1)[: i + 1]) for i in range(3)
    ]
    comparisons = [
        Comparison("0", position=None, gap=None),
        Comparison("1", position=1, gap=1e-5),
        Comparison("2", position=1, gap=None),
    ]
    session = Session(3, 1.0, Counts(origins=Counter(redraft=9, sibling=2)), {})
    found = summarise(SCRIPTED, answers, comparisons, [session])
    assert (found.identical, found.excused, found.mismatches, found.num_tokens) == (1, 1, 1, 9)
    assert found.accept_histogram == (3, 0, 1) and found.tau == 1.5
    assert found.misses == 9 + 2 - 3  # the first draft of an answer is none


def test_synchronous_drafts_are_no_misses() -> None:
    assert summary(SYNC, counts=Counts(origins=Counter(redraft=100))).misses == 0


def test_metrics_are_those_of_d3d_servers() -> None:
    counts = Counts(
        origins=Counter(hit=7, full=5, sibling=4, redraft=3),
        hits=Counter({0: 4, 2: 3}),
        misses=Counter({9: 5}),
        fulls=Counter({15: 3, 14: 2}),
    )
    summaries = {
        REFERENCE: summary(REFERENCE, num_answers=3),
        PLAIN_BATCH: summary(PLAIN_BATCH, identical=0, excused=1, mismatches=1),
        SCRIPTED: summary(SCRIPTED, accept_histogram=(2, 0, 2), counts=counts, mismatches=1),
        SYNC: summary(SYNC, excused=1, accept_histogram=(3, 1), counts=Counts(origins=Counter(redraft=4))),
    }
    assert metrics_of(summaries, block_size=BLOCK_SIZE) == {
        "prompts": 3,
        "tokens": 16,
        "mismatches": 1,
        "excused_ties": 1,
        "accept_lengths_seen": 2,
        "hits": 7,
        "misses": 5,
        "siblings": 4,
        "fulls": 5,
        "undrafted": 0,
        "hit_positions_seen": 2,
        "miss_positions_seen": 1,
        "fulls_of_b_minus_1": 3,
        "fulls_of_b_minus_2": 2,
        "plain_batch_differences": 2,
        "tau_scripted_async_c4f1_sibling_one": 2.0,
        "tau_cut_sync_one": 1.25,
    }


def test_shortcomings_are_named() -> None:
    enough = {
        **AT_LEAST,
        "accept_lengths_seen": BLOCK_SIZE,
        "hit_positions_seen": BLOCK_SIZE - 1,
        "miss_positions_seen": BLOCK_SIZE - 1,
    }
    assert shortcomings(enough, block_size=BLOCK_SIZE) == []
    for name, least in enough.items():
        found = shortcomings({**enough, name: least - 1}, block_size=BLOCK_SIZE)
        assert found == [f"{name} is {least - 1}, wanted are at least {least}"]


class FakeServer:
    """Answers, and counts a hit for every answer since it started."""

    started: list[FakeServer] = []  # noqa: RUF012 - emptied by the fixture
    breaks_after: int | None = None

    def __init__(self, name: str) -> None:
        self.url, self.num_answers = name, 0

    def __enter__(self) -> FakeServer:
        FakeServer.started.append(self)
        return self

    def __exit__(self, *_error: object) -> None:
        self.url = "stopped"

    def ask_all(self, questions: Sequence[Question], on_answer: Any) -> None:
        for question in questions:
            if self.num_answers == FakeServer.breaks_after:
                raise KeyboardInterrupt
            self.num_answers += 1
            on_answer(Answer(question.name, question.prompt_ids, (4, 2), top_two=(), accept_histogram=(1,)))


class FakeTokenizer:
    def decode(self, ids: Sequence[int], **_options: object) -> str:
        return f"said {len(ids)}"

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_options: object) -> str:
        return " / ".join(message["content"] for message in messages)

    def encode(self, text: str, **_options: object) -> list[int]:
        return list(text.encode())


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Everything that would load a model or talk to a server replaced; returns the folder of a set."""
    FakeServer.started, FakeServer.breaks_after = [], None
    (tmp_path / "model").mkdir()
    (tmp_path / "data").mkdir()
    rows = [{"id": "a", "turns": ["first", "second"]}, {"id": "b", "prompt": "other"}]
    (tmp_path / "data" / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def ask_all(url: str, questions: Sequence[Question], *, on_answer: Any, **_options: object) -> None:
        assert url == FakeServer.started[-1].url
        FakeServer.started[-1].ask_all(questions, on_answer)

    def server_state(_url: str) -> dict[str, Any]:
        hits = {"hit": FakeServer.started[-1].num_answers}
        return {"row_rounds_by_origin": hits, "fallbacks": {}, "row_rounds": 0, "options": {"mode": "async"}}

    monkeypatch.setattr(identity_runs, "smollm2_folder", lambda: tmp_path / "model")
    monkeypatch.setattr(identity_runs.AutoTokenizer, "from_pretrained", lambda _model: FakeTokenizer())
    monkeypatch.setattr(identity_runs, "ask_all", ask_all)
    monkeypatch.setattr(identity_runs, "server_state", server_state)
    monkeypatch.setattr(
        identity_runs.Starter, "start", lambda _self, server, _script: FakeServer(server.name)
    )
    return tmp_path / "data"


def finish(data: Path, work: Path, **settings: Any) -> identity.Record:
    wanted = Settings(sets=("talks",), prompts_per_set=2, **settings)
    asked = identity_runs.Identity(
        wanted, data=data, work=work, on_answer=lambda _run: None, progress=lambda _line: None
    )
    record = identity.Record(wanted, runs=asked.runs, work=work)
    asked.ask(lambda *finished: record.add(*finished))
    return record


def test_an_interrupted_bench_goes_on_where_it_was(fakes: Path, tmp_path: Path) -> None:
    only = ("cut-async-c4f1",)
    FakeServer.breaks_after = 2
    with pytest.raises(KeyboardInterrupt):
        finish(fakes, tmp_path, only=only)  # in the plain server's second turn
    FakeServer.breaks_after = 5
    with pytest.raises(KeyboardInterrupt):
        finish(fakes, tmp_path, only=only)  # in "eight", with "one" done
    written = json.loads((tmp_path / "bench" / "results" / "identity_cpu.json").read_text())
    assert written["metrics"]["complete"] == 0
    assert written["settings"]["runs_missing"] == ["cut-async-c4f1-redraft-eight"]
    assert [row["run"] for row in written["runs"]] == ["plain-one", "cut-async-c4f1-redraft-one"]
    FakeServer.breaks_after = None
    record = finish(fakes, tmp_path, only=only)
    names = ["plain", "plain", "cut-async-c4f1-redraft", "cut-async-c4f1-redraft"]
    assert len(FakeServer.started) == len(names)
    assert [server.num_answers for server in FakeServer.started] == [2, 1, 5, 1]
    metrics = record.result().metrics
    assert (metrics["complete"], metrics["prompts"], metrics["hits"], metrics["mismatches"]) == (1, 3, 6, 0)
    finish(fakes, tmp_path, only=only)
    assert len(FakeServer.started) == len(names), "a server was started for nothing"


def test_few_are_the_first_conversation_of_a_set(fakes: Path, tmp_path: Path) -> None:
    record = finish(fakes, tmp_path, only=("whole-sync",))
    answered = {str(run): summary.num_answers for run, summary in record.summaries.items()}
    assert answered == {"plain-one": 3, "whole-sync-one": 2, "whole-sync-eight": 2}


def test_answers_are_not_kept_for_other_flags_or_lengths(fakes: Path, tmp_path: Path) -> None:
    def folders(**settings: Any) -> set[Path]:
        starter = identity_runs.Starter(Settings(**settings), work=tmp_path, progress=lambda _line: None)
        return {starter.folder(server) for server in planned_servers(BLOCK_SIZE)}

    assert len(folders()) == len(planned_servers(BLOCK_SIZE))
    assert folders() == folders(prompts_per_set=3, only=("cut",))
    assert not folders() & folders(num_tokens=16)
    assert len(folders() & folders(layers=(0, 1))) == 1  # the plain server's
