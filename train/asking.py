"""Prompts spread over several endpoints, with a bound on each, through failures.

A prompt is never lost: it is answered, refused for a reason of its own, or still open when all endpoints are
dropped. Touches no file.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from train.conversations import Conversation, Message, Prompt
from train.endpoints import Endpoint, EndpointFailureError, PromptRefusedError, Question


class EndpointsLostError(Exception):
    """No endpoint is left."""


@dataclass(frozen=True)
class Patience:
    """When to give up.

    Attributes:
        failures: an endpoint that failed so many times with no answer between them is dropped. Requests that
            were on their way together fail together and count once.
        attempts: a prompt that failed so often on endpoints that had received it is refused: it may be what
            makes them fail.
        pause_s: wait after a first failure; it doubles with each further one, up to `max_pause_s`.
    """

    failures: int = 5
    attempts: int = 5
    pause_s: float = 1.0
    max_pause_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("failures", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed are 1 and more")


@dataclass(frozen=True)
class Listener:
    """What is told of the events; an exception of any of these ends the asking."""

    answered: Callable[[Conversation], None]
    refused: Callable[[Prompt, str], None]
    warn: Callable[[str], None]


@dataclass
class _Task:
    prompt: Prompt
    messages: list[Message]
    attempts: int = 0


@dataclass
class _Source:
    """An endpoint, its workers, and its failures since its last answer."""

    endpoint: Endpoint
    workers: list[asyncio.Task[None]] = field(default_factory=list)
    failures: int = 0
    failed_at: float = 0.0
    resume_at: float = 0.0
    dropped: bool = False


class Asking:
    """One run over prompts."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        question: Question,
        *,
        at_once: int,
        patience: Patience,
        listener: Listener,
    ) -> None:
        """`at_once` requests at most are under way at each endpoint."""
        assert at_once >= 1, f"no request could be under way: {at_once}"
        self._sources = [_Source(endpoint) for endpoint in endpoints]
        self._question = question
        self._at_once = at_once
        self._patience = patience
        self._listener = listener
        self._queue: asyncio.Queue[_Task | None] = asyncio.Queue()
        self._num_open = 0

    @property
    def num_endpoints(self) -> int:
        """Endpoints not dropped."""
        return sum(not source.dropped for source in self._sources)

    async def run(self, prompts: Iterable[Prompt]) -> None:
        """Ask all prompts; returns when each is answered or refused.

        Raises:
            EndpointsLostError: every endpoint was dropped before that.
        """
        for prompt in prompts:
            self._queue.put_nowait(_Task(prompt, list(prompt.opening)))
            self._num_open += 1
        if not self._num_open:
            return
        try:
            async with asyncio.TaskGroup() as group:
                for source in self._sources:
                    source.workers = [group.create_task(self._work(source)) for _ in range(self._at_once)]
        except BaseExceptionGroup as failed:
            # One is as good as another: a full disk fails every worker that has an answer.
            raise failed.exceptions[0] from None
        if self._num_open:
            raise EndpointsLostError(
                f"all endpoints are lost, {self._num_open} prompts are still to be asked"
            )

    async def _work(self, source: _Source) -> None:
        while True:
            await asyncio.sleep(max(0.0, source.resume_at - time.monotonic()))
            task = await self._queue.get()
            if task is None:
                return
            if time.monotonic() < source.resume_at:  # failed while this worker waited for a prompt
                self._queue.put_nowait(task)
                continue
            began = time.monotonic()
            try:
                conversation = await self._converse(source.endpoint, task)
            except PromptRefusedError as refusal:
                source.failures = 0
                self._refuse(task.prompt, str(refusal))
            except EndpointFailureError as failure:
                self._put_back(task, failure)
                self._count_failure(source, failure, began=began)
            except asyncio.CancelledError:
                self._queue.put_nowait(task)
                raise
            else:
                source.failures = 0
                self._close_one()
                self._listener.answered(conversation)

    async def _converse(self, endpoint: Endpoint, task: _Task) -> Conversation:
        """Answer the turns that have no answer yet; answers from before a failure are kept in the task."""
        answered = (len(task.messages) - len(task.prompt.opening)) // 2
        for content in task.prompt.turns[answered:]:
            turn = Message("user", content)
            answer = await endpoint.ask(self._question, [*task.messages, turn])
            task.messages += [turn, answer]
        return Conversation(task.prompt.id, tuple(task.messages))

    def _put_back(self, task: _Task, failure: EndpointFailureError) -> None:
        task.attempts += failure.reached
        if task.attempts < self._patience.attempts:
            self._queue.put_nowait(task)
        else:
            self._refuse(task.prompt, f"{task.attempts} endpoint failures, the last: {failure}")

    def _refuse(self, prompt: Prompt, reason: str) -> None:
        self._close_one()
        self._listener.refused(prompt, reason)

    def _close_one(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            for source in self._sources:
                for _ in source.workers:
                    self._queue.put_nowait(None)

    def _count_failure(self, source: _Source, failure: EndpointFailureError, *, began: float) -> None:
        if source.dropped or began < source.failed_at:
            return
        patience = self._patience
        pause = min(patience.max_pause_s, patience.pause_s * 2**source.failures)
        source.failures += 1
        source.failed_at = time.monotonic()
        source.resume_at = source.failed_at + pause
        if source.failures < patience.failures:
            self._listener.warn(
                f"{source.endpoint.url}: {failure}; failure {source.failures} of {patience.failures}, "
                f"next try in {pause:g} s"
            )
            return
        source.dropped = True
        self._listener.warn(
            f"{source.endpoint.url}: dropped after {source.failures} failures, the last: {failure}"
        )
        for worker in source.workers:  # this one too: it ends at its next wait
            worker.cancel()
