"""Checkpoints to resume from: complete or absent, and refused where a run could not go on exactly as it was.

    checkpoints/step-0000500/   DeepSpeed's files (weights, fp32 weights, moments, schedule) and state.json
    checkpoints/latest          the name of the folder to resume from

A folder is written under another name and renamed when all ranks are done; `latest` is replaced after that,
and older folders are removed last. The order of the data and all randomness follow from the step (`stream`),
so the step is all there is to remember. All ranks write to the same file system.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from train.config import TrainConfig
from train.distributed import World, barrier, raise_together, sum_over_ranks
from train.engine import bytes_of_state
from train.errors import TrainingError

LATEST = "latest"
STATE = "state.json"
_WRITING = ".writing"
_SPARE = 1.05  # headers and pickled bookkeeping beside the tensors

# Settings that may differ between two launches of a run: they do not change what a step computes.
_FREE = (
    "out",
    "data",
    "validation",
    "checkpoints",
    "logging",
    "attention",
    "compile",
    "activation_checkpointing",
)
_FREE_LIMITS = ("max_minutes", "max_skipped")


class CheckpointError(TrainingError):
    """A checkpoint cannot be written, or not be resumed from; earlier ones are as they were."""


@dataclass(frozen=True)
class RunState:
    """Where a run stands.

    Attributes:
        step: optimiser steps done, skipped ones included; the data position follows from it.
        skipped: steps skipped for a gradient that was not finite.
        examples_seen: over all ranks.
        seconds: of training so far, in all launches.
        best_tau: the best validation tau so far and `best_step` its step.
    """

    step: int = 0
    skipped: int = 0
    examples_seen: int = 0
    seconds: float = 0.0
    best_tau: float | None = None
    best_step: int | None = None


def resume_key(config: TrainConfig, *, world: World, data: str) -> dict[str, Any]:
    """What has to be equal for a run to go on as if it had not stopped, by field name."""
    fields = config.model_dump(mode="json", exclude={*_FREE})
    for name in _FREE_LIMITS:
        del fields["limits"][name]
    flat: dict[str, Any] = {}
    for section, values in fields.items():
        named = values.items() if isinstance(values, Mapping) else [("", values)]
        flat |= {f"{section}.{name}".rstrip("."): value for name, value in named}
    return flat | {"data.max_length": config.data.max_length, "world_size": world.size, "data": data}


class Checkpoints:
    """The checkpoints of one run, in `folder`.

    Args:
        keep: how many stay.
        key: see `resume_key`.
    """

    def __init__(self, folder: Path, *, keep: int, world: World, key: Mapping[str, Any]) -> None:
        self._folder = folder
        self._keep = keep
        self._world = world
        self._key = dict(key)

    def save(self, engine: DeepSpeedEngine, state: RunState) -> Path:
        """Write a checkpoint and make it the latest. On all ranks.

        Raises:
            CheckpointError: no space, or a write failed. Earlier checkpoints are untouched.
        """
        name = f"step-{state.step:07d}"
        if self._latest() == name:
            return self._folder / name
        self._check_space(engine)
        writing = self._folder / _WRITING
        try:
            engine.save_checkpoint(str(writing), tag=name, save_latest=False)
            if self._world.is_first:
                content = {"state": asdict(state), "key": self._key}
                _write_text(writing / name / STATE, json.dumps(content, indent=2) + "\n")
        except (OSError, RuntimeError) as error:  # torch reports a failed write as a RuntimeError
            shutil.rmtree(writing, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {state.step} could not be written to {self._folder} (is the disk "
                f"full?): {error}. {self._what_remains()}"
            ) from error
        if self._world.is_first:
            shutil.rmtree(self._folder / name, ignore_errors=True)
            (writing / name).rename(self._folder / name)
            shutil.rmtree(writing)
            _write_text(self._folder / LATEST, name)
            self._remove_old()
        barrier()
        return self._folder / name

    def resume(self, engine: DeepSpeedEngine) -> RunState | None:
        """Load the latest checkpoint; None if there is none. On all ranks.

        Raises:
            CheckpointError: it is damaged, or of a run with other settings or another number of ranks.
        """
        name = self._latest()
        if name is None:
            return None
        folder = self._folder / name
        try:
            content = json.loads((folder / STATE).read_text(encoding="utf-8"))
            state, key = RunState(**content["state"]), content["key"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self._folder / LATEST} names {name}, which is not a whole checkpoint ({error}). Write the "
                "name of an earlier folder into it, or remove it to begin anew"
            ) from error
        self._check_key(folder, key)
        try:
            loaded, _ = engine.load_checkpoint(str(self._folder), tag=name)
        except (OSError, RuntimeError, EOFError, KeyError) as error:
            raise CheckpointError(f"the checkpoint {folder} cannot be loaded: {error}") from error
        if loaded is None:
            raise CheckpointError(f"the checkpoint {folder} has no model file: copy it again")
        return state

    def _check_key(self, folder: Path, key: Mapping[str, Any]) -> None:
        theirs, ours = key.get("world_size"), self._key["world_size"]
        if theirs != ours:
            raise CheckpointError(
                f"the checkpoint {folder} was written by {theirs} rank(s), this run has {ours}: optimiser "
                f"state is split by rank, so resume with {theirs}, or start a new run (another `out`) from "
                "an exported drafter as model.path"
            )
        names = [name for name in self._key if key.get(name) != self._key[name]]
        if names:
            listed = "; ".join(f"{name} was {key.get(name)!r}, is {self._key[name]!r}" for name in names)
            raise CheckpointError(
                f"the checkpoint {folder} belongs to a run with other settings: {listed}. Restore them, "
                "or choose another `out`"
            )

    def _check_space(self, engine: DeepSpeedEngine) -> None:
        """Compare what all ranks will write with what is free, before anything is written."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._world.is_first:
            shutil.rmtree(self._folder / _WRITING, ignore_errors=True)  # left by a launch that was killed
        own = torch.tensor([bytes_of_state(engine)], dtype=torch.float64, device=engine.device)
        needed = _SPARE * sum_over_ranks(own)[0]
        free = shutil.disk_usage(self._folder).free
        problem = None
        if free < needed:
            problem = CheckpointError(
                f"a checkpoint takes about {needed / 1e9:.2f} GB, {self._folder} has {free / 1e9:.2f} GB "
                f"free: nothing was written. {self._what_remains()}"
            )
        raise_together(problem, device=engine.device)

    def _what_remains(self) -> str:
        name = self._latest()
        if name is None:
            return "There is no earlier checkpoint"
        return f"The checkpoint {name} is intact: free some space and start again to go on from it"

    def _latest(self) -> str | None:
        path = self._folder / LATEST
        return path.read_text(encoding="utf-8").strip() if path.is_file() else None

    def _remove_old(self) -> None:
        folders = sorted(path for path in self._folder.glob("step-*") if path.is_dir())
        for folder in folders[: -self._keep]:
            shutil.rmtree(folder)


def _write_text(path: Path, text: str) -> None:
    """Replace a small file whole."""
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
