"""What a run shows and records: a bar on the screen, TensorBoard, and one JSON line for every figure.

Owns the figures between two logging points and where they go. Only the first rank has a `Reporter`. Learning
curves are drawn from the lines of `metrics.jsonl`; after a resumed launch the last line of a step counts.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from train.config import TrainConfig

METRICS = "metrics.jsonl"
# Dense bf16 operations a second, by a part of the device's name; longer names first.
_PEAKS = {"GB200": 2.5e15, "B200": 2.25e15, "H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12}


@dataclass(frozen=True)
class Figures:
    """Means and rates since the last logging point, over all ranks.

    Attributes:
        loss, diff, ar: equation 7 and its two terms; a skipped step's are not counted.
        grad_norm: of the last step, before clipping.
        tokens_per_second: packed tokens that are no padding, context and blocks.
        mfu: needed operations over the devices' peak; None where the peak is not known.
    """

    step: int
    epoch: float
    loss: float
    diff: float
    ar: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    examples_per_second: float
    mfu: float | None
    skipped: int
    seconds: float


def device_peak(device: torch.device) -> float | None:
    """Dense bf16 operations a second, if the device is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


def check_recorders(config: TrainConfig) -> None:
    """Refuse a recorder that is not installed.

    Raises:
        ValueError: wandb is asked for and absent.
    """
    project = config.logging.wandb_project
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"logging.wandb_project is {project!r} but wandb is not installed: install it, or leave this out"
        )


class Stopwatch:
    """Seconds of training: runs only while steps are taken, not during validation or writing."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._total = 0.0

    @property
    def seconds(self) -> float:
        """So far."""
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return self._total + running

    def start(self) -> None:
        """Go on."""
        if self._since is None:
            self._since = time.monotonic()

    def pause(self) -> None:
        """Stop counting."""
        self._total, self._since = self.seconds, None


class Reporter:
    """Shows and records the figures of a run.

    On a terminal there is a bar; elsewhere (a log file) one line for each logging point.

    Args:
        out: the run's folder.
    """

    def __init__(
        self,
        out: Path,
        *,
        config: TrainConfig,
        total_steps: int,
    ) -> None:
        self._console = Console(highlight=False)
        self._metrics = (out / METRICS).open("a", encoding="utf-8")
        self._board = SummaryWriter(str(out / "tensorboard")) if config.logging.tensorboard else None
        self._wandb = _start_wandb(config, out)
        self._tau = "-"
        self._bar = Progress(
            TextColumn("[bold]train"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=total_steps, figures="")
        self._total_steps = total_steps

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
        self._metrics.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def say(self, line: str) -> None:
        """A line above the bar."""
        self._console.print(line, markup=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step)

    def training(self, figures: Figures) -> None:
        """One logging point."""
        self._record("train", figures.step, asdict(figures))
        mfu = "" if figures.mfu is None else f"  mfu {figures.mfu:.1%}"
        text = (
            f"loss {figures.loss:.3f} = diff {figures.diff:.3f} + ar {figures.ar:.3f}  tau {self._tau}  "
            f"{figures.tokens_per_second:,.0f} tok/s{mfu}  lr {figures.lr:.2e}"
        )
        self._bar.update(self._task, completed=figures.step, figures=text)
        if not self._console.is_terminal:
            self.say(f"step {figures.step}/{self._total_steps}  {text}  {figures.seconds:.0f} s")

    def validation(self, step: int, values: Mapping[str, Any]) -> None:
        """One validation; `values` holds tau and hit_rate among others."""
        self._record("validation", step, values)
        self._tau = f"{values['tau']:.3f}"
        self.say(f"step {step}: tau {self._tau}, hit rate {values['hit_rate']:.3f}")

    def _record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self._metrics.write(json.dumps({"kind": kind, **values, "step": step}) + "\n")
        self._metrics.flush()
        numbers = {
            f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)
        }
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)


def _start_wandb(config: TrainConfig, out: Path) -> Any:
    if config.logging.wandb_project is None:
        return None
    import wandb  # optional: `check_recorders` has looked for it

    settings = config.model_dump(mode="json")
    return wandb.init(project=config.logging.wandb_project, config=settings, dir=str(out), resume="allow")
