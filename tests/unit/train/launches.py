"""Runs of the training loop for `test_launches`, in processes of their own: DeepSpeed keeps global state.

    python -m torch.distributed.run --nproc_per_node 2 -m tests.unit.train.launches two_ranks FOLDER

What is seen goes to FOLDER/RANK.json; the tests judge it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests import tiny_folders
from train import assembly, engine
from train.assembly import Prepared, prepare
from train.checkpoint import CheckpointError, Checkpoints, RunState, resume_key
from train.config import TrainConfig, deepspeed_config, load_config
from train.distributed import World, join, leave, read_world
from train.engine import build_engine, master_weights
from train.export import Origin, export
from train.guard import StepGuard
from train.initial_drafter import load_drafter
from train.stream import steps

STEPS, HALF = 50, 25
LR = 1e-5  # the paper's
STAGES = (1, 2, 3)


def write_inputs(folder: Path) -> None:
    """A model and answers. Random answers: nothing to learn, but a gradient for every weight."""
    tiny_folders.write_model(folder / "model", hidden_size=32, intermediate_size=64)
    generator = torch.Generator().manual_seed(0)
    words = tiny_folders.WORDS
    with (folder / "answers.jsonl").open("w") as file:
        for i in range(STEPS):
            picked = [words[j] for j in torch.randint(len(words), (14,), generator=generator)]
            turns = [("user", picked[:4]), ("assistant", picked[4:])]
            messages = [{"role": role, "content": " ".join(text)} for role, text in turns]
            file.write(json.dumps({"id": f"row-{i}", "conversations": messages}) + "\n")


def config_of(folder: Path, *overrides: str) -> TrainConfig:
    """A run of `STEPS` steps, one of them a logging point."""
    path = folder / f"config-{os.getpid()}.yaml"
    settings = {
        "out": str(folder / "out"),
        "model": {"path": str(folder / "model"), "target": str(folder / "model"), "block_size": 4},
        "data": {"train": [str(folder / "answers.jsonl")], "max_length": 48, "cache": str(folder / "tokens")},
        "packing": {"num_anchors": 4, "multiple_of": 8},
        "optimizer": {"lr": LR, "min_lr": LR},
        "batch": {"global_size": 4, "rows": 1},
        "limits": {"epochs": 10, "max_steps": STEPS},
        "validation": {"coverage": 3, "every": 10**6, "batch_tokens": 512},
        "checkpoints": {"every": 10**6},
        "logging": {"every": 1, "tensorboard": False},
        "attention": "sdpa",
    }
    path.write_text(json.dumps(settings))
    return load_config(path, overrides=overrides)


def two_ranks(folder: Path, world: World) -> dict[str, Any]:
    """R8, R9, the guard and validation on two ranks."""
    seen: dict[str, Any] = {"exports": {}}
    config = config_of(folder)
    prepared = quietly(config, world)
    join(world, log=folder / "deepspeed.log")
    for stage in STAGES:
        export_untrained(folder, f"stage-{stage}", prepared, world, f"zero.stage={stage}")
    seen["straight"] = straight_run(folder, prepared, world)
    resumed_run(folder, prepared, world)
    seen["guard"] = poisoned_steps(folder, prepared, world)
    return seen


def one_rank(folder: Path, world: World) -> dict[str, Any]:
    """Refusals at resume and at save; `folder` is one that `two_ranks` has left behind."""
    seen: dict[str, Any] = {}
    config = config_of(folder, f"out={folder / 'resumed'}")
    prepared = quietly(config, world)
    join(world, log=folder / "deepspeed.log")
    seen["world_size"] = message_of(lambda: run(config, prepared, world))
    seen["disk"] = full_disk(folder, prepared, world)
    seen["stage_0"] = {
        "masters": [str(weight.dtype) for _, weight in master_weights(new_engine(folder, prepared, world, 0))]
    }
    return seen


def straight_run(folder: Path, prepared: Prepared, world: World) -> dict[str, Any]:
    """50 steps at once: how far the fp32 weights moved, and the kind of the optimiser's state."""
    engines: list[Any] = []
    before: dict[str, torch.Tensor] = {}

    def build(*args: Any, **kwargs: Any) -> Any:
        engines.append(build_engine(*args, **kwargs))
        before.update({name: weight.clone() for name, weight in master_weights(engines[0])})
        return engines[0]

    with mock.patch.object(assembly, "build_engine", build):
        run(config_of(folder, f"out={folder / 'straight'}", "zero.stage=2"), prepared, world)
    after = dict(master_weights(engines[0]))
    moved = {name: float((weight != before[name]).double().mean()) for name, weight in after.items()}
    state = [
        str(value.dtype)
        for values in engines[0].basic_optimizer.state.values()
        for name, value in values.items()
        if name in ("state1", "state2")
    ]
    return {
        "moved": moved,
        "shapes": {name: list(weight.shape) for name, weight in after.items()},
        "dtypes": sorted({str(weight.dtype) for weight in after.values()}),
        "state": state,
    }


def resumed_run(folder: Path, prepared: Prepared, world: World) -> None:
    """The same 50 steps in two launches; the first is asked to stop at half."""
    config = config_of(folder, f"out={folder / 'resumed'}", "zero.stage=2")
    points = iter(range(1, STEPS + 1))
    run(config, prepared, world, asked_to_stop=lambda: next(points) == HALF)
    run(config, prepared, world)


def poisoned_steps(folder: Path, prepared: Prepared, world: World) -> dict[str, Any]:
    """What the guard does when the gradient, or the loss, of the second rank alone is not finite."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        said: list[str] = []
        built = new_engine(folder, prepared, world, stage)
        guard = StepGuard(built, max_skipped=3, report=said.append)
        batches = list(zip(range(3), steps(prepared.plan, first_step=0, pin=False), strict=False))
        poison = Poison(built, active=world.rank == 1)
        before = {name: weight.clone() for name, weight in master_weights(built)}
        with poison.gradient("lm.model.layers.1.mlp.up_proj.weight"):
            applied = [guard.take(batches[0][1], step=1).applied]
        with poison.loss():
            applied.append(guard.take(batches[1][1], step=2).applied)
        still = all(torch.equal(weight, before[name]) for name, weight in master_weights(built))
        applied.append(guard.take(batches[2][1], step=3).applied)
        found[str(stage)] = {"said": said, "applied": applied, "still": still}
    return found


class Poison:
    """Makes an engine's gradient or loss NaN, on the ranks where it is active."""

    def __init__(self, built: Any, *, active: bool) -> None:
        self._module = built.module
        self._factor = float("nan") if active else 1.0

    @contextmanager
    def gradient(self, name: str) -> Iterator[None]:
        hook = dict(self._module.named_parameters())[name].register_hook(lambda grad: grad * self._factor)
        yield
        hook.remove()

    @contextmanager
    def loss(self) -> Iterator[None]:
        def spoil(_module: Any, _inputs: Any, losses: Any) -> Any:
            return type(losses)(total=losses.total * self._factor, diff=losses.diff, ar=losses.ar)

        hook = self._module.register_forward_hook(spoil)
        yield
        hook.remove()


def full_disk(folder: Path, prepared: Prepared, world: World) -> dict[str, Any]:
    """A save that fails half-way, one that is refused beforehand, and what is left."""
    built = new_engine(folder, prepared, world, 1)
    place = folder / "disk"
    key = resume_key(config_of(folder), world=world, data=prepared.fingerprint)
    checkpoints = Checkpoints(place, keep=2, world=world, key=key)
    checkpoints.save(built, RunState(step=1))
    files = sorted(str(path.relative_to(place)) for path in place.rglob("*"))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    failed = message_of(lambda: checkpoints.save(built, RunState(step=2)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    with mock.patch("shutil.disk_usage", return_value=mock.Mock(free=1000)):
        refused = message_of(lambda: checkpoints.save(built, RunState(step=2)))
    again = Checkpoints(place, keep=2, world=world, key=key).resume(new_engine(folder, prepared, world, 1))
    return {
        "failed": failed,
        "refused": refused,
        "before": files,
        "after": sorted(str(path.relative_to(place)) for path in place.rglob("*")),
        "resumed_at": None if again is None else again.step,
    }


def export_untrained(folder: Path, name: str, prepared: Prepared, world: World, *overrides: str) -> None:
    config = config_of(folder, *overrides)
    built = new_engine(folder, prepared, world, config.zero.stage)
    origin = Origin(
        config=config,
        d3d_config=prepared.drafter.d3d_config,
        data_sha256={},
        tokenizer=config.model.path,
    )
    export(built, folder / name, origin=origin, world=world, metrics={"step": 0})


def new_engine(folder: Path, prepared: Prepared, world: World, stage: int) -> Any:
    """Under ZeRO-3 every weight is really split: small ones stay whole otherwise."""
    config = config_of(folder, f"zero.stage={stage}")

    def split_all(*args: Any, **kwargs: Any) -> dict[str, Any]:
        settings = deepspeed_config(*args, **kwargs)
        if stage == 3:
            settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return settings

    with mock.patch.object(engine, "deepspeed_config", split_all):
        model = load_drafter(prepared.drafter, config)
        return build_engine(model, config, world=world, total_steps=STEPS)


def run(
    config: TrainConfig,
    prepared: Prepared,
    world: World,
    *,
    asked_to_stop: Callable[[], bool] = lambda: False,
) -> None:
    assembly.train(config, prepared, world=world, say=lambda _: None, asked_to_stop=asked_to_stop)


def quietly(config: TrainConfig, world: World) -> Prepared:
    return prepare(config, world=world, say=lambda _: None)


def message_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return "no error"


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    world = read_world()
    seen = {"two_ranks": two_ranks, "one_rank": one_rank}[name](folder, world)
    (folder / f"{name}-{world.rank}.json").write_text(json.dumps(seen))
    leave()


if __name__ == "__main__":
    main()
