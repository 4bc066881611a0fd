"""The runs of the identity bench: which servers are asked what, and where their answers are kept.

One server runs at a time, and only if an answer of it is missing. Later turns of a conversation contain the
plain server's answers to earlier ones, so every server sees the same prompts. Knows nothing of comparing or
reporting.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from bench.answers import Answer, AnswerStore, Question, ask_all
from bench.prompts import Conversation, assistant, chat_ids, read_set, user
from bench.result import ROOT
from d3d_sglang.drafter.initialise import DrafterPlan, init_drafter
from d3d_sglang.drafter_config import DEFAULT_FANOUT
from serve.launch import ServerProcess
from serve.smollm2 import smollm2_folder
from tests.e2e.scripted.environment import scripted_environment
from tests.e2e.scripted.script import Script

SETS = ("gsm8k", "humaneval", "mbpp", "math500", "mt_bench")
SERVERS = ("plain", "drafter", "scripted")
MODES: Mapping[str, int] = {"one": 1, "eight": 8}  # requests at once
# What tokens on the CPU depend on besides our own code.
PACKAGES = ("sglang", "torch", "transformers")


@dataclass(frozen=True)
class Run:
    """One server in one mode."""

    server: str
    mode: str

    def __str__(self) -> str:
        return f"{self.server}, {self.mode} at {'a time' if self.mode == 'one' else 'once'}"


REFERENCE = Run("plain", "one")
PLAIN_BATCH = Run("plain", "eight")  # shows what batching alone does to tokens


@dataclass(frozen=True)
class Settings:
    """What is asked and of whom."""

    sets: tuple[str, ...] = SETS
    prompts_per_set: int = 8
    num_tokens: int = 64
    block_size: int = 16
    layers: tuple[int, ...] = (0, 29)


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


class Servers:
    """How each server is started, and what its answers depend on.

    Args:
        work: folder for the drafter and the script.
        progress: called with a line of text now and then while something is prepared.
    """

    def __init__(self, settings: Settings, *, work: Path, progress: Callable[[str], None]) -> None:
        self.model = smollm2_folder()
        self._settings = settings
        self._work = work
        self._progress = progress
        self._depends: dict[str, Any] = {
            "num_tokens": settings.num_tokens,
            "versions": [version(package) for package in PACKAGES],
            "model": _digest(self.model, "*"),
        }

    def plain(self) -> ServerProcess:
        """Stock SGLang without speculative decoding."""
        return self._server()

    def drafter(self) -> ServerProcess:
        """D3D with the untrained drafter."""
        return self._server(*self._d3d_flags())

    def scripted(self, script: Script) -> ServerProcess:
        """D3D with the scripted drafter."""
        folder = self._work / "scripted"
        folder.mkdir(parents=True, exist_ok=True)
        script.save(folder / "script.json")
        rounds = folder / "rounds.jsonl"
        rounds.unlink(missing_ok=True)
        env = scripted_environment(folder, script=folder / "script.json", rounds=rounds)
        return self._server(*self._d3d_flags(), env=env)

    def key(self, server: str) -> str:
        """Name for stored answers: they are of use as long as nothing they depend on changes."""
        if server == "plain":
            depends = {**self._depends, "sources": _digest(ROOT / "d3d_sglang" / "cpu_engine")}
        else:
            sources = _digest(ROOT / "d3d_sglang"), _digest(ROOT / "tests" / "e2e" / "scripted")
            drafter = self._settings.block_size, self._settings.layers
            depends = {**self._depends, "sources": sources, "drafter": drafter}
        return f"{server}-{hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:12]}"

    def _server(self, *flags: str, env: Mapping[str, str] | None = None) -> ServerProcess:
        return ServerProcess(self.model, *flags, env=env, device="cpu", progress=self._progress)

    def _d3d_flags(self) -> list[str]:
        return [
            "--speculative-algorithm",
            "D3D",
            "--speculative-draft-model-path",
            str(self._drafter_folder()),
        ]

    def _drafter_folder(self) -> Path:
        layers, block_size = self._settings.layers, self._settings.block_size
        folder = self._work / f"drafter-b{block_size}-layers-{'-'.join(map(str, layers))}"
        if not (folder / "config.json").is_file():
            model = str(self.model)
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
        self._settings = settings
        self._work = work
        self._on_answer = on_answer
        self._servers = Servers(settings, work=work, progress=progress)
        # Once, at the start: what is edited meanwhile is not what these servers were started with.
        self._keys = {server: self._servers.key(server) for server in SERVERS}
        self._tokenizer = AutoTokenizer.from_pretrained(self._servers.model)
        self._conversations = [
            conversation
            for name in settings.sets
            for conversation in read_set(data, name, count=settings.prompts_per_set)
        ]

    @property
    def num_questions(self) -> int:
        """Questions of one run: every turn is one."""
        return sum(len(conversation.turns) for conversation in self._conversations)

    def answers(self) -> dict[Run, list[Answer]]:
        """All answers, in the order of the questions. One server runs at a time."""
        with LazyServer(self._servers.plain) as server:
            plain = self._ask_in_turns(server)
            questions = [answer.question for answer in plain]
            answers = {REFERENCE: plain, PLAIN_BATCH: self._ask(server, PLAIN_BATCH, questions)}
        script = Script.of([(answer.prompt_ids, answer.output_ids) for answer in plain])
        for name, start in (
            ("drafter", self._servers.drafter),
            ("scripted", lambda: self._servers.scripted(script)),
        ):
            with LazyServer(start) as server:
                for run in (Run(name, mode) for mode in MODES):
                    answers[run] = self._ask(server, run, questions)
        return answers

    def _ask_in_turns(self, server: LazyServer) -> list[Answer]:
        """The reference answers; those to earlier turns become part of the later turns' prompts."""
        answers: dict[str, Answer] = {}
        for turn in range(max(len(conversation.turns) for conversation in self._conversations)):
            talking = [conversation for conversation in self._conversations if turn < len(conversation.turns)]
            questions = [self._question(conversation, turn, answers) for conversation in talking]
            answers |= {answer.name: answer for answer in self._ask(server, REFERENCE, questions)}
        return list(answers.values())

    def _question(self, conversation: Conversation, turn: int, answers: Mapping[str, Answer]) -> Question:
        messages = []
        for earlier in range(turn):
            output_ids = answers[_name(conversation, earlier)].output_ids
            said = self._tokenizer.decode(output_ids, skip_special_tokens=True)
            messages += [user(conversation.turns[earlier]), assistant(said)]
        messages.append(user(conversation.turns[turn]))
        return Question(_name(conversation, turn), chat_ids(self._tokenizer, messages))

    def _ask(self, server: LazyServer, run: Run, questions: Sequence[Question]) -> list[Answer]:
        """Answers of one run: those stored, and the others from the server."""
        store = AnswerStore(self._work / self._keys[run.server] / run.mode)
        answers = {question: store.get(question) for question in questions}
        missing = [question for question, answer in answers.items() if answer is None]

        def keep(answer: Answer) -> None:
            store.add(answer)
            answers[answer.question] = answer
            self._on_answer(run)

        for _ in range(len(questions) - len(missing)):
            self._on_answer(run)
        if missing:
            ask_all(
                server.url,
                missing,
                num_tokens=self._settings.num_tokens,
                at_once=MODES[run.mode],
                top_two=run == REFERENCE,
                on_answer=keep,
            )
        return [answer for answer in answers.values() if answer is not None]


def _name(conversation: Conversation, turn: int) -> str:
    return f"{conversation.name}.{turn + 1}"


def _digest(folder: Path, pattern: str = "*.py") -> str:
    """Digest of the names and contents of the files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob(pattern) if path.is_file()):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
