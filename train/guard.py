"""One optimiser step over its micro-batches, skipped by all ranks together if the gradient is not finite.

How it is noticed without waiting for the device: DeepSpeed checks the reduced gradient once an optimiser
step, on all ranks (it reads the norm for clipping at that point anyway), and skips the step if it is not
finite. A loss that is not finite can have a finite gradient (that of a label whose logit is -inf), so its
gradient is made NaN, on the device. Only after a skipped step, a rare thing, are the micro-batches run again,
slowly, to say where it began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.utils import safe_get_full_grad

from train.distributed import gather_objects
from train.errors import TrainingError
from train.model import Losses
from train.stream import MicroBatch

Report = Callable[[str], None]
_LOSS = "the loss"


class NotFiniteError(TrainingError):
    """Several steps in a row had a gradient that is not finite: the run cannot go on by itself."""


@dataclass(frozen=True)
class StepLosses:
    """Means over a rank's micro-batches of one step, `[3]` fp32 on the device: total, diff, ar."""

    values: torch.Tensor
    applied: bool


class StepGuard:
    """Takes optimiser steps; counts the skipped ones.

    Args:
        max_skipped: skipped steps in a row that are tolerated.
        report: told why a step was skipped.
    """

    def __init__(self, engine: DeepSpeedEngine, *, max_skipped: int, report: Report) -> None:
        self._engine = engine
        self._max_skipped = max_skipped
        self._report = report
        self._in_a_row = 0
        self.skipped = 0

    def take(self, batches: Sequence[MicroBatch], *, step: int) -> StepLosses:
        """Forward and backward over `batches`, then one step of the optimiser.

        Raises:
            NotFiniteError: more than `max_skipped` steps in a row were skipped. Weights and optimiser state
                are those of the last step that was taken.
        """
        losses = self._run(batches)
        if self._engine.was_step_applied():
            self._in_a_row = 0
            return StepLosses(values=losses, applied=True)
        reason = self._explain(batches)
        if reason is None:
            self._report(f"step {step}: a gradient was not finite, run again it was: the step was taken")
            self._in_a_row = 0
            return StepLosses(values=losses, applied=True)
        self.skipped += 1
        self._in_a_row += 1
        self._report(f"step {step} was skipped: {reason}")
        if self._in_a_row > self._max_skipped:
            raise NotFiniteError(
                f"{self._in_a_row} steps in a row were skipped (limits.max_skipped is {self._max_skipped}), "
                f"the last one because {reason}. Start from an earlier checkpoint or with a smaller "
                "optimizer.lr, and look at what is named"
            )
        return StepLosses(values=losses, applied=False)

    def _run(
        self,
        batches: Sequence[MicroBatch],
        *,
        on_losses: Callable[[MicroBatch, Losses], None] | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        engine = self._engine
        total = torch.zeros(3, device=engine.device)
        for i, batch in enumerate(batches):
            losses: Losses = engine(batch.packed.to(engine.device, non_blocking=True))
            if on_losses is not None:
                on_losses(batch, losses)
            engine.backward(_spoiled_if_not_finite(losses.total))
            if before_step is not None and i == len(batches) - 1:
                before_step()
            engine.step()  # counts micro-batches; it steps at the last one
            total += torch.stack([losses.total, losses.diff, losses.ar]).detach().float()
        return total / len(batches)

    def _explain(self, batches: Sequence[MicroBatch]) -> str | None:
        """Run the step again and say what is not finite; None if all was, and the step has been taken."""
        found: list[str] = []

        def look_at_losses(batch: MicroBatch, losses: Losses) -> None:
            values = {"total": losses.total, "diff": losses.diff, "ar": losses.ar}
            if not all(bool(torch.isfinite(value)) for value in values.values()):
                read = ", ".join(f"{name} {float(value.detach()):.4g}" for name, value in values.items())
                found.append(f"{_LOSS} is not finite ({read}) on the examples {', '.join(batch.ids)}")

        def look_at_gradients() -> None:
            name = first_not_finite(self._engine)
            if name is not None:
                found.append(f"the gradient of {name} is not finite")

        self._run(batches, on_losses=look_at_losses, before_step=look_at_gradients)
        if self._engine.was_step_applied():
            return None
        # A loss says more than the gradients it spoiled, and only its own rank has seen it.
        everywhere = [text for texts in gather_objects(found) for text in texts]
        everywhere.sort(key=lambda text: not text.startswith(_LOSS))
        return everywhere[0] if everywhere else "the gradient is not finite (no single parameter's is)"


def first_not_finite(engine: DeepSpeedEngine) -> str | None:
    """The first parameter, in the order of the network, whose reduced gradient is not finite.

    Between the last backward pass and the step. Every rank must call it: gradients may be split over them.
    """
    for name, weight in engine.module.named_parameters():
        gradient = safe_get_full_grad(weight) if weight.requires_grad else None
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            return name
    return None


def _spoiled_if_not_finite(loss: torch.Tensor) -> torch.Tensor:
    """The loss; where it is not finite its gradient is NaN everywhere. Decided on the device."""
    factor = torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)
    return loss * factor
