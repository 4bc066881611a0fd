"""The config of a run: what is refused and how, overrides, and what DeepSpeed is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from train.config import TrainConfig, deepspeed_config, dump_config, load_config

RECIPES = sorted((Path(__file__).resolve().parents[3] / "train/recipes").glob("*.yaml"))
SMALLEST = {"out": "runs/x", "model": {"path": "a", "target": "b"}, "data": {"train": ["c.jsonl"]}}


def load(tmp_path: Path, *overrides: str, **sections: Any) -> TrainConfig:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(SMALLEST | sections))
    return load_config(path, overrides=overrides)


def test_defaults_are_the_papers_settings(tmp_path: Path) -> None:
    """Section 4.1; gamma is DFlash's."""
    config = load(tmp_path)
    assert config.model.block_size == 16
    assert (config.packing.num_anchors, config.packing.gamma) == (128, 7.0)
    assert config.loss.ar_weight == 1.0
    assert config.batch.global_size == 16
    assert config.limits.epochs == 3
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.min_lr, optimizer.warmup) == (
        "adamw8bit",
        1e-5,
        1e-6,
        0.01,
    )
    assert (optimizer.clip, optimizer.weight_decay) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=fast", "optimizer.lr is 'fast': input should be a valid number"),
        ("optimizer.lr=0", "optimizer.lr is 0: input should be greater than 0"),
        ("optimizer.min_lr=1", "optimizer: min_lr is 1.0, it must be at most lr, 1e-05"),
        ("optimizer.name=sgd", "optimizer.name is 'sgd': input should be 'adamw8bit' or 'adamw'"),
        ("optimizer.lrr=1", "optimizer.lrr is unknown: known are name, lr, min_lr, betas"),
        ("optimiser.lr=1", "optimiser is unknown: known are out, seed, model"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1 is missing"),
        ("batch.rows='4'", "batch.rows is '4': input should be a valid integer"),
        ("batch.rows=true", "batch.rows is True: input should be a valid integer"),
        ("compile=1", "compile is 1: input should be a valid boolean"),
        ("zero.stage=4", "zero.stage is 4: input should be 0, 1, 2 or 3"),
        ("model.block_size=1", "model.block_size is 1: input should be greater than or equal to 2"),
        ("model.layers=[3, 1]", "model: layers must name different layers, ascending"),
        ("model.shape={model_type: llama}", "model: shape is given without random_init: true"),
        ("model.thinking_mode=maybe", "model.thinking_mode is 'maybe': input should be 'on' or 'off'"),
        ("data.train=[]", "data: train must name at least one file"),
        ("data.synthetic=4", "data: train must name at least one file, or else synthetic"),
        ("attention=eager", "attention is 'eager': input should be 'sdpa', 'flex'"),
        ("validation.coverage=17", "validation.coverage is 17, it must be at most model.block_size, 16"),
        ("limits.max_minutes=-1", "limits.max_minutes is -1: input should be greater than 0"),
        ("model=3", "model is 3: input should be an object"),
        ("precision=fp32", "precision is fp32 with zero.stage 0"),
        ("out=null", "out is None: input should be a valid string"),
    ],
)
def test_refusals_name_field_value_and_what_is_allowed(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path, override, zero={"stage": 0})


def test_all_errors_are_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 3 error") as caught:
        load(tmp_path, "seed=-1", "zero.stage=9", "optimizer.clip=0")
    assert len(str(caught.value).splitlines()) == 4


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.target is missing"):
        load(tmp_path, model={"path": "a"})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr", "it must be a field and a value"),
        ("=3", "it must be a field and a value"),
        ("seed.x=3", "seed holds 0, it is not a section"),
        ("seed=[1", "the value is not YAML"),
    ],
)
def test_a_wrong_override_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path, override, seed=0)


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [", "\x00"])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=str(path)):
        load_config(path)
    with pytest.raises(ValueError, match="cannot be read"):
        load_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize("text", ["3e-4", "3E-04", "0.0003", "3.0e-4"])
def test_numbers_may_be_written_as_people_write_them(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, f"optimizer.lr={text}").optimizer.lr == 3e-4


def test_paths_may_begin_at_home(tmp_path: Path) -> None:
    assert load(tmp_path, "data.train=[~/a.jsonl]").data.train == (str(Path.home() / "a.jsonl"),)


def test_the_written_config_reads_back_equal(tmp_path: Path) -> None:
    config = load(tmp_path, "model.layers=[0, 4]", "optimizer.betas=[0.8, 0.9]", "limits.max_minutes=3")
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config


@pytest.mark.parametrize(
    ("global_size", "rows", "ranks", "passes"), [(16, 1, 2, 8), (32, 32, 1, 1), (12, 2, 3, 2)]
)
def test_accumulation_follows_from_the_sizes(
    tmp_path: Path, global_size: int, rows: int, ranks: int, passes: int
) -> None:
    config = load(tmp_path, batch={"global_size": global_size, "rows": rows})
    settings = deepspeed_config(config, world_size=ranks)
    assert settings["gradient_accumulation_steps"] == passes
    assert settings["train_batch_size"] == rows * passes * ranks


@pytest.mark.parametrize(("global_size", "rows", "ranks"), [(16, 3, 1), (4, 4, 2)])
def test_sizes_that_do_not_divide_are_refused(
    tmp_path: Path, global_size: int, rows: int, ranks: int
) -> None:
    config = load(tmp_path, batch={"global_size": global_size, "rows": rows})
    with pytest.raises(ValueError, match=rf"global_size is {global_size}: .* {rows} x {ranks}"):
        deepspeed_config(config, world_size=ranks)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_is_told_bf16_and_to_check_the_gradient(tmp_path: Path, stage: int) -> None:
    settings = deepspeed_config(load(tmp_path, f"zero.stage={stage}"), world_size=2)
    assert settings["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert settings["zero_optimization"]["stage"] == stage
    assert settings["gradient_clipping"] == 1.0


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid_for_one_and_two_ranks(path: Path) -> None:
    config = load_config(path)
    for ranks in (1, 2):
        if config.batch.global_size >= config.batch.rows * ranks:
            deepspeed_config(config, world_size=ranks)


def test_the_recipes_of_the_paper_have_its_settings() -> None:
    assert len(RECIPES) == 5
    for name in ("qwen3-8b", "qwen3-32b"):
        config = load_config(next(path for path in RECIPES if path.stem == name))
        defaults = TrainConfig.model_validate_json(
            '{"out": "x", "model": {"path": "a", "target": "b"}, "data": {"train": ["c"]}}'
        )
        assert config.optimizer == defaults.optimizer
        assert config.packing == defaults.packing
        assert config.batch.accumulation(2) == 8
        assert (config.model.block_size, config.limits.epochs) == (16, 3)
