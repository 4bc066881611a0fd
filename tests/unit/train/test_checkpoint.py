"""Checkpoints as files: whole or absent, the newest kept, refused where a run would not go on the same.

The engine is a stand-in; DeepSpeed's own is in `test_launches`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.train.fake_engine import FakeEngine
from train.checkpoint import CheckpointError, Checkpoints, RunState, resume_key
from train.config import TrainConfig, load_config
from train.distributed import World

ALONE = World(rank=0, size=1, local_rank=0)
SMALLEST = {"out": "x", "model": {"path": "a", "target": "b"}, "data": {"train": ["c"]}}


def config_of(tmp_path: Path, *overrides: str) -> TrainConfig:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(SMALLEST))
    return load_config(path, overrides=overrides)


def checkpoints_of(
    tmp_path: Path, *overrides: str, keep: int = 2, world: World = ALONE, data: str = "d"
) -> Checkpoints:
    key = resume_key(config_of(tmp_path, *overrides), world=world, data=data)
    return Checkpoints(tmp_path / "checkpoints", keep=keep, world=world, key=key)


def saved(tmp_path: Path, *steps: int, keep: int = 2) -> Any:
    """An engine whose first weight is the last step saved."""
    engine: Any = FakeEngine()
    for step in steps:
        engine.module["first"].weight.data.fill_(step)
        checkpoints_of(tmp_path, keep=keep).save(engine, RunState(step=step))
    return engine


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


def test_a_run_goes_on_where_it_stood(tmp_path: Path) -> None:
    state = RunState(step=7, skipped=1, examples_seen=70, seconds=3.5, best_tau=2.25, best_step=5)
    engine: Any = FakeEngine()
    engine.module["first"].weight.data.fill_(7.0)
    checkpoints_of(tmp_path).save(engine, state)
    other: Any = FakeEngine()
    assert checkpoints_of(tmp_path).resume(other) == state
    assert torch.equal(other.weights, engine.weights)


def test_without_a_checkpoint_a_run_begins(tmp_path: Path) -> None:
    engine: Any = FakeEngine()
    assert checkpoints_of(tmp_path).resume(engine) is None


def test_the_newest_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10, 100, 1000, keep=2)
    assert names(tmp_path) == ["latest", "step-0000100", "step-0001000"]
    assert (tmp_path / "checkpoints/latest").read_text() == "step-0001000"


def test_saving_a_step_again_changes_nothing(tmp_path: Path) -> None:
    engine = saved(tmp_path, 5)
    engine.save_checkpoint = None  # must not be called
    checkpoints_of(tmp_path).save(engine, RunState(step=5))
    assert names(tmp_path) == ["latest", "step-0000005"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_a_failed_write_leaves_the_earlier_one(tmp_path: Path, error: Exception) -> None:
    engine = saved(tmp_path, 5)
    write = engine.save_checkpoint

    def fail(folder: str, **arguments: Any) -> None:
        write(folder, **arguments)
        raise error

    engine.save_checkpoint = fail
    with pytest.raises(CheckpointError, match=r"step 10 could not be written .*step-0000005 is intact"):
        checkpoints_of(tmp_path).save(engine, RunState(step=10))
    assert names(tmp_path) == ["latest", "step-0000005"]
    assert checkpoints_of(tmp_path).resume(FakeEngine()) == RunState(step=5)  # type: ignore[arg-type]


def test_a_launch_that_was_killed_while_writing_does_no_harm(tmp_path: Path) -> None:
    engine = saved(tmp_path, 5)
    left = tmp_path / "checkpoints/.writing/step-0000010"
    left.mkdir(parents=True)
    (left / "weights.pt").write_bytes(b"half")
    assert checkpoints_of(tmp_path).resume(engine) == RunState(step=5)
    checkpoints_of(tmp_path).save(engine, RunState(step=10))
    assert names(tmp_path) == ["latest", "step-0000005", "step-0000010"]
    assert checkpoints_of(tmp_path).resume(engine) == RunState(step=10)


@pytest.mark.parametrize(
    "damage", ["no state", "half a state", "no weights", "half the weights", "no folder"]
)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    engine = saved(tmp_path, 5)
    folder = tmp_path / "checkpoints/step-0000005"
    match damage:
        case "no state":
            (folder / "state.json").unlink()
        case "half a state":
            (folder / "state.json").write_text('{"state": {"step"')
        case "no weights":
            (folder / "weights.pt").unlink()
        case "half the weights":
            content = (folder / "weights.pt").read_bytes()
            (folder / "weights.pt").write_bytes(content[: len(content) // 2])
        case "no folder":
            folder.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="step-0000005"):
        checkpoints_of(tmp_path).resume(engine)


def test_another_number_of_ranks_is_refused_first(tmp_path: Path) -> None:
    engine = saved(tmp_path, 5)
    world = World(rank=0, size=2, local_rank=0)
    checkpoints = checkpoints_of(tmp_path, "batch.global_size=32", world=world)
    with pytest.raises(CheckpointError, match=r"by 1 rank\(s\), this run has 2.* resume with 1"):
        checkpoints.resume(engine)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=2e-5", r"optimizer\.lr was 1e-05, is 2e-05"),
        ("batch.rows=2", r"batch\.rows was 1, is 2"),
        ("zero.stage=2", r"zero\.stage was 1, is 2"),
        ("limits.epochs=4", r"limits\.epochs was 3, is 4"),
        ("data.max_length=64", r"data\.max_length was 2048, is 64"),
        ("seed=1", "seed was 0, is 1"),
        ("precision=fp32", "precision was 'bf16', is 'fp32'"),
    ],
)
def test_settings_that_change_the_steps_are_refused(tmp_path: Path, override: str, message: str) -> None:
    engine = saved(tmp_path, 5)
    with pytest.raises(CheckpointError, match=message):
        checkpoints_of(tmp_path, override).resume(engine)


def test_other_data_is_refused(tmp_path: Path) -> None:
    engine = saved(tmp_path, 5)
    with pytest.raises(CheckpointError, match="data was 'd', is 'other'"):
        checkpoints_of(tmp_path, data="other").resume(engine)


@pytest.mark.parametrize(
    "override",
    [
        "limits.max_minutes=3",
        "limits.max_skipped=9",
        "checkpoints.every=7",
        "validation.every=9",
        "logging.every=3",
        "attention=triton",
        "compile=true",
        "out=y",
        "data.train=[moved]",
    ],
)
def test_settings_that_do_not_are_free(tmp_path: Path, override: str) -> None:
    engine = saved(tmp_path, 5)
    assert checkpoints_of(tmp_path, override).resume(engine) == RunState(step=5)
