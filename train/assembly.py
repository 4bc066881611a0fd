"""Puts a run together: checks and reads what it needs, joins the other ranks, and trains.

Owns the order of the beginning. Everything that can take long or fail on one rank alone (models and data read
from disk) comes before the process group, in which the other ranks would wait.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from transformers.utils import logging as transformers_logging

from train.chat_format import read_chat_format
from train.checkpoint import Checkpoints, RunState, resume_key
from train.config import DataSection, TrainConfig, dump_config
from train.dataset import Dataset, Example
from train.dataset_build import Source, build_dataset
from train.distributed import World, join
from train.engine import build_engine
from train.export import Origin
from train.initial_drafter import DrafterPlan, load_drafter, plan_drafter
from train.progress import Reporter, check_recorders
from train.stream import Plan
from train.synthetic import SyntheticExamples
from train.tokenise import Limits
from train.trainer import Run, Trainer
from train.validation import Validator

CONFIG_COPY = "config.yaml"
DEEPSPEED_LOG = "deepspeed.log"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """What is read and checked before any rank waits for another one.

    Attributes:
        fingerprint: changes with the training examples.
        files_sha256: digest of every data file, by name; on the first rank.
    """

    drafter: DrafterPlan
    plan: Plan
    dev: tuple[Example, ...]
    fingerprint: str
    files_sha256: dict[str, str]


def prepare(config: TrainConfig, *, world: World, say: Say) -> Prepared:
    """Check the drafter against the target, and read the data. Processes of a host tokenise it once.

    Raises:
        ValueError: see `plan_drafter`, `build_dataset` and `Plan`.
    """
    transformers_logging.disable_progress_bar()
    check_recorders(config)
    say(f"checking {config.model.path} against {config.model.target}")
    drafter = plan_drafter(config)
    mask_token_id = drafter.d3d_config.mask_token_id
    examples: Dataset | SyntheticExamples
    if config.data.synthetic is None:
        examples = _read(config, config.data.train, drafter, world=world, say=say)
    else:
        examples = _synthetic(config, drafter, count=config.data.synthetic)
    dev: tuple[Example, ...] = ()
    if config.data.dev is not None:
        found = _read(config, (config.data.dev,), drafter, world=world, say=say)
        dev = tuple(found[i] for i in range(min(len(found), config.validation.prompts)))
    plan = Plan(examples, config, world=world, mask_token_id=mask_token_id)
    say(
        f"{len(examples)} examples to train on, {len(dev)} to validate with: {plan.total_steps} steps of "
        f"{config.batch.global_size}, {plan.steps_per_epoch} an epoch"
    )
    return Prepared(
        drafter=drafter,
        plan=plan,
        dev=dev,
        fingerprint=examples.fingerprint,
        files_sha256=_files_sha256(config.data) if world.is_first else {},
    )


def train(
    config: TrainConfig, prepared: Prepared, *, world: World, say: Say, asked_to_stop: Callable[[], bool]
) -> None:
    """Join the other ranks and train.

    Args:
        asked_to_stop: see `Run`.

    Raises:
        TrainingError: the run cannot go on; what was saved stays.
    """
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    join(world, log=out / DEEPSPEED_LOG)
    if world.is_first:
        (out / CONFIG_COPY).write_text(dump_config(config), encoding="utf-8")
    say(f"loading {config.model.path} on {world.size} x {world.device.type}")
    model = load_drafter(prepared.drafter, config)
    engine = build_engine(model, config, world=world, total_steps=prepared.plan.total_steps)
    checkpoints = Checkpoints(
        out / "checkpoints",
        keep=config.checkpoints.keep,
        world=world,
        key=resume_key(config, world=world, data=prepared.fingerprint),
    )
    state = checkpoints.resume(engine)
    if state is not None:
        say(f"going on from step {state.step}")
    state = state or RunState()
    reporter = Reporter(out, config=config, total_steps=prepared.plan.total_steps) if world.is_first else None
    origin = Origin(
        config=config,
        d3d_config=prepared.drafter.d3d_config,
        data_sha256=prepared.files_sha256,
        tokenizer=config.model.path,
    )
    with reporter or nullcontext():
        Trainer(
            Run(
                config=config,
                world=world,
                engine=engine,
                plan=prepared.plan,
                checkpoints=checkpoints,
                origin=origin,
                state=state,
                validator=Validator(prepared.dev, config, world=world) if prepared.dev else None,
                reporter=reporter,
                asked_to_stop=asked_to_stop,
            )
        ).train()


def _synthetic(config: TrainConfig, drafter: DrafterPlan, *, count: int) -> SyntheticExamples:
    return SyntheticExamples(
        count=count,
        length=config.data.max_length,
        num_ids=drafter.network.vocab_size,
        mask_token_id=drafter.d3d_config.mask_token_id,
        seed=config.seed,
    )


def _read(
    config: TrainConfig, files: tuple[str, ...], drafter: DrafterPlan, *, world: World, say: Say
) -> Dataset:
    mode = drafter.d3d_config.thinking_mode
    source = Source(
        files=tuple(map(Path, files)),
        limits=Limits(max_length=config.data.max_length, mask_token_id=drafter.d3d_config.mask_token_id),
        max_dropped_share=config.data.max_dropped,
        cache=Path(config.data.cache) if config.data.cache else Path(config.out) / "tokens",
    )
    chat_format = read_chat_format(config.model.target, thinking=mode == "on")
    dataset = build_dataset(source, chat_format, console=Console() if world.is_first else None)
    say(f"{', '.join(files)}: {dataset.account}")
    return dataset


def _files_sha256(data: DataSection) -> dict[str, str]:
    digests = {}
    for path in (*data.train, *filter(None, [data.dev])):
        with Path(path).open("rb") as file:
            digests[Path(path).name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
