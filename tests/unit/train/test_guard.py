"""Steps whose gradient is not finite: skipped, explained, and not without end. (Ranks: test_two_ranks.)"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.unit.train.fake_engine import FakeEngine
from train.guard import NotFiniteError, StepGuard, first_not_finite
from train.stream import MicroBatch


@dataclass(frozen=True)
class Row:
    """Stands for a packed batch."""

    inputs: torch.Tensor

    def to(self, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        return self.inputs.to(device)


def batches() -> list[MicroBatch]:
    rows: list[Any] = [Row(torch.tensor([[1.0, 2.0]])), Row(torch.tensor([[3.0, -1.0]]))]
    return [MicroBatch(packed=row, ids=(f"example-{i}",)) for i, row in enumerate(rows)]


def guard_of(engine: Any, *, max_skipped: int = 2) -> tuple[StepGuard, list[str]]:
    said: list[str] = []
    return StepGuard(engine, max_skipped=max_skipped, report=said.append), said


def test_a_finite_step_is_taken_once() -> None:
    engine = FakeEngine()
    before = engine.weights
    guard, said = guard_of(engine)
    losses = guard.take(batches(), step=1)
    assert losses.applied and not said and guard.skipped == 0
    assert (engine.forwards, engine.steps) == (2, 1)
    assert not torch.equal(engine.weights, before)


def test_losses_are_means_over_the_micro_batches() -> None:
    engine = FakeEngine()
    by_hand = [FakeEngine()(batch.packed.inputs).total.item() for batch in batches()]
    guard, _ = guard_of(engine)
    total, diff, ar = guard.take(batches(), step=1).values.tolist()
    assert total == pytest.approx(sum(by_hand) / 2, rel=1e-6)
    assert (diff, ar) == (pytest.approx(0.25 * total), pytest.approx(0.75 * total))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_names_its_examples(value: float) -> None:
    engine = FakeEngine()
    engine.loss_factor = lambda i: value if i % 2 else 1.0
    before = engine.weights
    guard, said = guard_of(engine)
    losses = guard.take(batches(), step=7)
    assert not losses.applied and guard.skipped == 1
    assert torch.equal(engine.weights, before)
    assert len(said) == 1
    assert "step 7 was skipped: the loss is not finite" in said[0] and "example-1" in said[0]
    assert "example-0" not in said[0]


def test_a_loss_of_infinity_with_a_finite_gradient_is_seen() -> None:
    """As of a label whose logit is -inf: the sum is infinite, its derivative is not."""

    class Engine(FakeEngine):
        def __call__(self, inputs: torch.Tensor) -> Any:
            losses = super().__call__(inputs)
            return type(losses)(total=losses.total + math.inf, diff=losses.diff, ar=losses.ar)

    engine = Engine()
    before = engine.weights
    guard, said = guard_of(engine)
    assert not guard.take(batches(), step=1).applied
    assert torch.equal(engine.weights, before)
    assert "the loss is not finite" in said[0]


def test_a_gradient_that_is_not_finite_names_the_parameter() -> None:
    engine = FakeEngine()
    engine.gradient_factor = lambda _: math.nan
    guard, said = guard_of(engine)
    assert not guard.take(batches(), step=3).applied
    assert said == ["step 3 was skipped: the gradient of second.weight is not finite"]


def test_a_passing_fault_costs_no_step() -> None:
    """Run again, the gradient is finite: the step counts, and is taken once."""
    engine = FakeEngine()
    engine.gradient_factor = lambda i: math.nan if i < 2 else 1.0
    reference = FakeEngine()
    guard_of(reference)[0].take(batches(), step=1)
    guard, said = guard_of(engine)
    assert guard.take(batches(), step=1).applied
    assert guard.skipped == 0 and "the step was taken" in said[0]
    assert torch.equal(engine.weights, reference.weights)


def test_the_run_stops_after_too_many_in_a_row() -> None:
    engine = FakeEngine()
    bad = True
    engine.loss_factor = lambda _: math.nan if bad else 1.0
    guard, _ = guard_of(engine, max_skipped=2)
    for step in (1, 2):
        guard.take(batches(), step=step)
    bad = False
    assert guard.take(batches(), step=3).applied  # a good one between them: the count begins anew
    bad = True
    for step in (4, 5):
        guard.take(batches(), step=step)
    before = engine.weights
    with pytest.raises(NotFiniteError, match=r"3 steps in a row .*max_skipped is 2.*example-0"):
        guard.take(batches(), step=6)
    assert torch.equal(engine.weights, before)
    assert guard.skipped == 5


def test_the_first_parameter_in_the_order_of_the_network_is_named() -> None:
    engine: Any = FakeEngine()
    for name, weight in engine.module.named_parameters():
        weight.grad = torch.full_like(weight, math.nan if name in ("first.bias", "second.weight") else 0.0)
    assert first_not_finite(engine) == "first.bias"
    for weight in engine.module.parameters():
        weight.grad = torch.zeros_like(weight)
    assert first_not_finite(engine) is None
