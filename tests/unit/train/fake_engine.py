"""An engine without DeepSpeed: two linear layers, plain SGD, steps that are not finite skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from train.model import Losses


class FakeEngine:
    """What the guard and the checkpoints use of an engine.

    Attributes:
        loss_factor: called with the number of the forward pass; multiplies the loss.
        gradient_factor: called with the number of the backward pass; multiplies the gradient of `second`.
    """

    def __init__(self, *, accumulation: int = 2) -> None:
        torch.manual_seed(0)
        self.module = torch.nn.ModuleDict({"first": torch.nn.Linear(2, 2), "second": torch.nn.Linear(2, 1)})
        self.device = torch.device("cpu")
        self.loss_factor: Callable[[int], float] = lambda _: 1.0
        self.gradient_factor: Callable[[int], float] = lambda _: 1.0
        self.forwards = self.backwards = self.steps = 0
        self._accumulation = accumulation
        self._applied = False
        self.module["second"].weight.register_hook(lambda grad: grad * self.gradient_factor(self.backwards))

    def __call__(self, inputs: torch.Tensor) -> Losses:
        loss = self.module["second"](self.module["first"](inputs)).square().mean()
        loss = loss * self.loss_factor(self.forwards)
        self.forwards += 1
        return Losses(total=loss, diff=loss.detach() * 0.25, ar=loss.detach() * 0.75)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._accumulation).backward()
        self.backwards += 1

    def step(self) -> None:
        self._applied = False
        if self.backwards % self._accumulation:
            return
        weights = list(self.module.parameters())
        if all(bool(torch.isfinite(weight.grad).all()) for weight in weights):
            self._applied = True
            self.steps += 1
            with torch.no_grad():
                for weight in weights:
                    weight -= 0.1 * weight.grad
        for weight in weights:
            weight.grad = None

    def was_step_applied(self) -> bool:
        return self._applied

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([weight.detach().flatten() for weight in self.module.parameters()])

    # What checkpoints use.

    @property
    def basic_optimizer(self) -> Any:
        return torch.optim.SGD(self.module.parameters())

    def save_checkpoint(self, folder: str, *, tag: str, save_latest: bool) -> None:
        assert not save_latest
        path = Path(folder) / tag
        path.mkdir(parents=True)
        torch.save(self.module.state_dict(), path / "weights.pt")

    def load_checkpoint(self, folder: str, *, tag: str) -> tuple[str | None, dict[str, Any]]:
        path = Path(folder) / tag / "weights.pt"
        if not path.is_file():
            return None, {}
        self.module.load_state_dict(torch.load(path))
        return str(path), {}
