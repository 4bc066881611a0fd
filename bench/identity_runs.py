"""The runs of the identity bench: how its servers are started and asked, and where their answers are kept.

One server runs at a time, and only if an answer of it is missing. Later turns of a conversation contain the
plain server's answers to earlier ones, so every server sees the same prompts. Knows nothing of comparing or
reporting.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from bench.answers import Answer, AnswerStore, Question, ask_all
from bench.identity_counts import Counts, Session, SessionStore, counts_of, read_log, server_state
from bench.identity_plan import PLAIN, REFERENCE, START_SECONDS, Run, Server, Settings, planned_runs
from bench.prompts import Conversation, assistant, chat_ids, read_set, user
from bench.result import ROOT
from d3d_sglang.drafter.initialise import DrafterPlan, init_drafter
from d3d_sglang.drafter_config import DEFAULT_FANOUT
from serve.launch import ServerError, ServerProcess
from serve.smollm2 import default_home, smollm2_folder
from tests.e2e.scripted.environment import scripted_environment
from tests.e2e.scripted.script import Script

# What tokens on the CPU depend on besides our own code.
PACKAGES = ("sglang", "torch", "transformers")


class LazyServer:
    """A server that starts when its address is first asked for and stops with the `with` block."""

    def __init__(self, start: Callable[[], AbstractContextManager[ServerProcess]]) -> None:
        self._start = start
        self._stack = ExitStack()

    @cached_property
    def url(self) -> str:
        return self._stack.enter_context(self._start()).url

    def __enter__(self) -> LazyServer:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()


class Starter:
    """How each server is started, and what its answers depend on.

    Args:
        work: folder for answers and scripts.
        progress: called with a line of text now and then while something is prepared.
    """

    def __init__(self, settings: Settings, *, work: Path, progress: Callable[[str], None]) -> None:
        self.model = smollm2_folder()
        self._settings = settings
        self._work = work
        self._progress = progress
        # Once, at the start: what is edited meanwhile is not what these servers were started with.
        self._depends: dict[str, Any] = {
            "num_tokens": settings.num_tokens,
            "versions": [version(package) for package in PACKAGES],
            "model": _digest(self.model, "*"),
        }
        self._package = _digest(ROOT / "d3d_sglang")
        self._cpu_engine = _digest(ROOT / "d3d_sglang" / "cpu_engine")
        self._scripted = _digest(ROOT / "tests" / "e2e" / "scripted")

    def folder(self, server: Server) -> Path:
        """Where a server's answers are kept: they are of use as long as nothing they depend on changes."""
        if server == PLAIN:
            depends = {**self._depends, "sources": self._cpu_engine}
        else:
            sources = self._package, self._scripted if server.drafter == "scripted" else None
            drafter = self._settings.block_size, self._settings.layers, server.flags
            depends = {**self._depends, "sources": sources, "drafter": drafter}
        digest = hashlib.sha256(json.dumps(depends).encode()).hexdigest()
        return self._work / f"{server.name}-{digest[:12]}"

    def log(self, server: Server) -> Path:
        """Where a scripted server logs its rounds; others have no such file."""
        return self.folder(server) / "rounds.jsonl"

    def start(self, server: Server, script: Script) -> ServerProcess:
        """A server, not started yet; `script` is what a scripted drafter goes by."""
        flags: list[str] = []
        env: Mapping[str, str] = {}
        if server != PLAIN:
            drafter = self._drafter(None if server.drafter == "whole" else self._settings.layers)
            flags = ["--speculative-algorithm", "D3D", "--speculative-draft-model-path", str(drafter)]
        if server.drafter == "scripted":
            folder = self.folder(server)
            folder.mkdir(parents=True, exist_ok=True)
            script.save(folder / "script.json")
            self.log(server).unlink(missing_ok=True)
            env = scripted_environment(folder, script=folder / "script.json", rounds=self.log(server))
        self._progress(f"starting {server.name}")
        return ServerProcess(
            self.model, *flags, *server.flags, env=env, device="cpu", progress=self._progress
        )

    def _drafter(self, layers: tuple[int, ...] | None) -> Path:
        """Folder of an untrained drafter of some or all layers of the target, made if it is not there."""
        block_size, model = self._settings.block_size, str(self.model)
        kept = "all" if layers is None else "-".join(map(str, layers))
        folder = default_home() / "drafters" / f"{self.model.name}-b{block_size}-layers-{kept}"
        with _locked(folder.with_name(folder.name + ".lock")):
            if not (folder / "config.json").is_file():
                plan = DrafterPlan(
                    source=model,
                    out=folder,
                    block_size=block_size,
                    fanout=DEFAULT_FANOUT,
                    layers=layers,
                    target=model,
                )
                init_drafter(plan, progress=self._progress)
        return folder


class Identity:
    """The questions, and the answers of all runs.

    Args:
        data: folder of the benchmark sets; work: where answers are kept.
        on_answer: called once for every answer, stored ones included.
        progress: called with a line of text while a server is prepared.

    Raises:
        ValueError: a set is missing or too short, or a run is asked for that does not exist.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        data: Path,
        work: Path,
        on_answer: Callable[[Run], None],
        progress: Callable[[str], None],
    ) -> None:
        self.runs = planned_runs(settings)
        self._settings = settings
        self._on_answer = on_answer
        sets = [read_set(data, name, count=settings.prompts_per_set) for name in settings.sets]
        self._conversations = [conversation for one in sets for conversation in one]
        self._few = {name for one in sets for name in _names(one[0])}
        self._starter = Starter(settings, work=work, progress=progress)
        self._tokenizer = AutoTokenizer.from_pretrained(self._starter.model)

    def num_questions(self, run: Run) -> int:
        """Questions of a run: every turn is one."""
        return len(self._names(run))

    def num_missing(self, run: Run) -> int:
        """Answers not stored yet."""
        stored = {path.stem for path in self._answers_of(run).glob("*.json")}
        return len(set(self._names(run)) - stored)

    def expected_seconds(self) -> float:
        """How long the missing answers take, roughly, on two cores."""
        total = 0.0
        for _, runs in groupby(self.runs, key=lambda run: run.server):
            answering = sum(run.seconds * self.num_missing(run) for run in runs)
            total += START_SECONDS + answering if answering else 0.0
        return total

    def ask(self, on_run: Callable[[Run, list[Answer], list[Session]], None]) -> None:
        """Ask one server after the other; `on_run` gets every run when all its answers are there.

        The first run is the reference. Answers are in the order of the questions.
        """
        reference: list[Answer] = []
        for server, runs in groupby(self.runs, key=lambda run: run.server):
            script = Script.of([(answer.prompt_ids, answer.output_ids) for answer in reference])
            with LazyServer(partial(self._starter.start, server, script)) as started:
                for run in runs:
                    if run == REFERENCE:
                        answers = reference = self._ask_in_turns(started)
                    else:
                        wanted = set(self._names(run))
                        questions = [answer.question for answer in reference if answer.name in wanted]
                        answers = self._ask(started, run, questions)
                    on_run(run, answers, self._sessions_of(run).all())

    def _names(self, run: Run) -> list[str]:
        names = [name for conversation in self._conversations for name in _names(conversation)]
        return [name for name in names if name in self._few] if run.server.few else names

    def _answers_of(self, run: Run) -> Path:
        return self._starter.folder(run.server) / run.mode

    def _sessions_of(self, run: Run) -> SessionStore:
        return SessionStore(self._starter.folder(run.server) / f"{run.mode}-sessions")

    def _ask_in_turns(self, server: LazyServer) -> list[Answer]:
        """The reference answers; those to earlier turns become part of the later turns' prompts."""
        answers: dict[str, Answer] = {}
        for turn in range(max(len(conversation.turns) for conversation in self._conversations)):
            talking = [conversation for conversation in self._conversations if turn < len(conversation.turns)]
            questions = [self._question(conversation, turn, answers) for conversation in talking]
            answers |= {answer.name: answer for answer in self._ask(server, REFERENCE, questions)}
        return list(answers.values())

    def _question(self, conversation: Conversation, turn: int, answers: Mapping[str, Answer]) -> Question:
        names = _names(conversation)
        messages = []
        for earlier in range(turn):
            output_ids = answers[names[earlier]].output_ids
            said = self._tokenizer.decode(output_ids, skip_special_tokens=True)
            messages += [user(conversation.turns[earlier]), assistant(said)]
        messages.append(user(conversation.turns[turn]))
        return Question(names[turn], chat_ids(self._tokenizer, messages))

    def _ask(self, server: LazyServer, run: Run, questions: Sequence[Question]) -> list[Answer]:
        """Answers of one run: those stored, and the others from the server."""
        store = AnswerStore(self._answers_of(run))
        answers = {question: store.get(question) for question in questions}
        missing = [question for question, answer in answers.items() if answer is None]
        for _ in range(len(questions) - len(missing)):
            self._on_answer(run)
        if missing:
            keep_session = self._begin_session(server, run)

            def keep(answer: Answer) -> None:
                store.add(answer)
                keep_session()
                answers[answer.question] = answer
                self._on_answer(run)

            ask_all(
                server.url,
                missing,
                num_tokens=self._settings.num_tokens,
                at_once=run.at_once,
                top_two=run == REFERENCE,
                on_answer=keep,
            )
        return [answer for answer in answers.values() if answer is not None]

    def _begin_session(self, server: LazyServer, run: Run) -> Callable[[], None]:
        """Start counting; returns what to call after every answer."""
        url, store = server.url, self._sessions_of(run)
        path, num_answers = store.new(), 0
        before, _ = self._counted(url, run.server)
        started = time.monotonic()

        def keep() -> None:
            nonlocal num_answers
            num_answers += 1
            counts, options = self._counted(url, run.server)
            seconds = round(time.monotonic() - started, 2)
            store.keep(path, Session(num_answers, seconds, counts - before, options))

        return keep

    def _counted(self, url: str, server: Server) -> tuple[Counts, dict[str, Any]]:
        """What a server has counted since its start, and its effective options."""
        if server == PLAIN:
            return Counts(), {}
        state = server_state(url)
        rounds = read_log(self._starter.log(server)) if server.drafter == "scripted" else ()
        if server.drafter == "scripted" and state["row_rounds"] and not rounds:
            raise ServerError(f"{server.name} has logged no round: its scripted drafter was not loaded")
        return counts_of(state, rounds), state["options"]


def _names(conversation: Conversation) -> list[str]:
    """Names of a conversation's questions, one a turn."""
    return [f"{conversation.name}.{turn + 1}" for turn in range(len(conversation.turns))]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`: benches side by side make one drafter once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest(folder: Path, pattern: str = "*.py") -> str:
    """Digest of the names and contents of the files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob(pattern) if path.is_file()):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
