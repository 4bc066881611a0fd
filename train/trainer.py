"""The training loop: steps, figures, validation, checkpoints, and a clean end.

Owns the order in which things happen; what each of them is lives in its own module. All ranks run it in step.
Between two logging points the loop itself reads nothing from the device: losses add up there, counts here.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from train.checkpoint import Checkpoints, RunState
from train.config import TrainConfig
from train.distributed import World, sum_over_ranks
from train.engine import check_optimizer_state
from train.export import Origin, export
from train.flops import training_flops
from train.guard import StepGuard, StepLosses
from train.progress import Figures, Reporter, Stopwatch, device_peak
from train.stream import MicroBatch, Plan, steps
from train.validation import Validator

BEST, LAST = "best", "last"


@dataclass(frozen=True)
class Run:
    """Everything a loop works with.

    Attributes:
        state: where it starts.
        validator: None without development answers.
        reporter: on the first rank alone.
        asked_to_stop: whether this process got a signal to end.
    """

    config: TrainConfig
    world: World
    engine: DeepSpeedEngine
    plan: Plan
    checkpoints: Checkpoints
    origin: Origin
    state: RunState
    validator: Validator | None
    reporter: Reporter | None
    asked_to_stop: Callable[[], bool]


class Trainer:
    """One launch of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._state = run.state
        self._guard = StepGuard(run.engine, max_skipped=run.config.limits.max_skipped, report=self._say)
        self._watch = Stopwatch()
        self._since_log = _Tally(run.engine.device)
        self._peak = device_peak(run.engine.device)
        self._started = time.monotonic()

    def train(self) -> RunState:
        """Train to the end of the run, or until time is up or a signal came; returns where it stands.

        Raises:
            TrainingError: a checkpoint or an export could not be written, or see `StepGuard.take`.
        """
        run, every = self._run, self._run.config
        self._started = time.monotonic()
        pin = run.engine.device.type == "cuda"
        stopped = False
        self._watch.start()
        for batches in steps(run.plan, first_step=self._state.step, pin=pin):
            self._watch.start()
            self._take(batches)
            done = self._state.step == run.plan.total_steps
            stopped = (done or self._due(every.logging.every)) and self._log() and not done
            if done or self._due(every.validation.every):
                self._validate()
            if done or stopped or self._due(every.checkpoints.every):
                self._save()
            if stopped:
                break
        self._export(LAST)
        self._say(self._farewell(stopped=stopped))
        return self._state

    def _take(self, batches: list[MicroBatch]) -> None:
        run, state = self._run, self._state
        losses = self._guard.take(batches, step=state.step + 1)
        if state.step == run.state.step:
            check_optimizer_state(run.engine, run.config.optimizer)
        self._since_log.add(losses, batches, network=run.engine.module.lm.config)
        self._state = dataclasses.replace(
            state,
            step=state.step + 1,
            skipped=run.state.skipped + self._guard.skipped,
            examples_seen=state.examples_seen + run.config.batch.global_size,
        )
        if run.reporter is not None:
            run.reporter.advance(self._state.step)

    def _due(self, every: int) -> bool:
        return self._state.step % every == 0

    def _log(self) -> bool:
        """Show the figures since the last time; returns whether any rank has to stop."""
        run = self._run
        limit = run.config.limits.max_minutes
        late = limit is not None and time.monotonic() - self._started >= 60 * limit
        sums = self._since_log.over_ranks(stop=late or run.asked_to_stop())  # waits for the device
        seconds = self._watch.seconds
        self._watch = Stopwatch()
        self._watch.start()  # waiting for the next batch counts
        self._since_log = _Tally(run.engine.device)
        self._state = dataclasses.replace(self._state, seconds=self._state.seconds + seconds)
        if run.reporter is not None:
            run.reporter.training(self._figures(sums, seconds=seconds))
        return sums["stop"] > 0

    def _figures(self, sums: Mapping[str, float], *, seconds: float) -> Figures:
        run, state = self._run, self._state
        taken = max(sums["taken"], 1.0)
        mfu = None if self._peak is None else sums["flops"] / (seconds * self._peak * run.world.size)
        return Figures(
            step=state.step,
            epoch=state.step / run.plan.steps_per_epoch,
            loss=sums["total"] / taken,
            diff=sums["diff"] / taken,
            ar=sums["ar"] / taken,
            lr=run.engine.get_lr()[0],
            grad_norm=float(run.engine.get_global_grad_norm()),
            tokens_per_second=sums["tokens"] / seconds,
            examples_per_second=sums["examples"] / seconds,
            mfu=mfu,
            skipped=state.skipped,
            seconds=state.seconds,
        )

    def _validate(self) -> None:
        run = self._run
        if run.validator is None:
            return
        self._watch.pause()
        acceptance = run.validator.measure(run.engine.module)
        tau = acceptance.tau
        assert tau is not None, "every answer has a round"
        if run.reporter is not None:
            values = acceptance.to_dict() | {"tau": tau, "hit_rate": acceptance.hit_rate}
            run.reporter.validation(self._state.step, values)
        if self._state.best_tau is None or tau > self._state.best_tau:
            self._state = dataclasses.replace(self._state, best_tau=tau, best_step=self._state.step)
            self._export(BEST)

    def _save(self) -> None:
        if self._run.config.data.synthetic is None:  # of random rows nothing is worth keeping
            self._watch.pause()
            self._run.checkpoints.save(self._run.engine, self._state)

    def _export(self, name: str) -> None:
        run, state = self._run, self._state
        if run.config.data.synthetic is not None:
            return
        metrics: dict[str, Any] = dataclasses.asdict(state)
        out = Path(run.config.out) / name
        export(run.engine, out, origin=run.origin, world=run.world, metrics=metrics)

    def _farewell(self, *, stopped: bool) -> str:
        run, state = self._run, self._state
        out = Path(run.config.out)
        how = "stopped" if stopped else "done"
        best = "" if state.best_tau is None else f", best tau {state.best_tau:.3f} (step {state.best_step})"
        drafter = f": the drafter is {out / (LAST if state.best_tau is None else BEST)}."
        if run.config.data.synthetic is not None:
            drafter = ", trained on random rows: no drafter was written."
        more = " Start the same command again to go on." if stopped else ""
        return f"{how} at step {state.step} of {run.plan.total_steps}{best}{drafter}{more}"

    def _say(self, line: str) -> None:
        if self._run.reporter is not None:
            self._run.reporter.say(line)


class _Tally:
    """Sums of a rank since the last logging point: losses on the device, counts on the host."""

    def __init__(self, device: torch.device) -> None:
        self._losses = torch.zeros(3, dtype=torch.float32, device=device)
        self._counts = {"taken": 0, "tokens": 0, "examples": 0, "flops": 0}

    def add(self, losses: StepLosses, batches: list[MicroBatch], *, network: Any) -> None:
        """One step. A skipped one took time too, but its losses mean nothing."""
        counts = self._counts
        if losses.applied:
            self._losses += losses.values
            counts["taken"] += 1
        counts["tokens"] += sum(batch.packed.num_tokens for batch in batches)
        counts["examples"] += sum(batch.packed.num_rows for batch in batches)
        counts["flops"] += sum(training_flops(network, batch.packed) for batch in batches)

    def over_ranks(self, *, stop: bool) -> dict[str, float]:
        """All sums over all ranks, and how many ranks want to stop. Waits for the device."""
        counts = {**self._counts, "stop": int(stop)}
        on_host = torch.tensor(list(counts.values()), dtype=torch.float64).to(self._losses.device)
        sums = sum_over_ranks(torch.cat([self._losses.double(), on_host]))
        return dict(zip(["total", "diff", "ar", *counts], sums, strict=True))
