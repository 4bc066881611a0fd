"""Puts a run together: checks and reads what it needs, joins the other ranks, and trains.

Owns the order of the beginning. Everything that can take long or fail on one rank alone (models and data read
from disk) comes before the process group, in which the other ranks would wait.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging as transformers_logging

from train.checkpoint import Checkpoints, RunState, resume_key
from train.config import TrainConfig, dump_config
from train.dataset import Example
from train.distributed import World, join
from train.engine import build_engine
from train.export import Origin
from train.initial_drafter import DrafterPlan, load_drafter, plan_drafter
from train.progress import Reporter
from train.stream import Examples, Plan
from train.synthetic import SyntheticExamples
from train.trainer import Run, Trainer
from train.validation import Validator

CONFIG_COPY = "config.yaml"
DEEPSPEED_LOG = "deepspeed.log"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """What is read and checked before any rank waits for another one.

    Attributes:
        files_sha256: digest of every data file, by name.
    """

    drafter: DrafterPlan
    plan: Plan
    dev: tuple[Example, ...]
    files_sha256: dict[str, str]


def prepare(config: TrainConfig, *, world: World, say: Say) -> Prepared:
    """Check the drafter against the target, and read the data.

    Raises:
        ValueError: see `plan_drafter`, `Dataset` and `Plan`.
    """
    transformers_logging.disable_progress_bar()
    say(f"checking {config.model.path} against {config.model.target}")
    drafter = plan_drafter(config)
    mask_token_id = drafter.d3d_config.mask_token_id
    examples = _training_examples(config, drafter, say=say)
    dev: tuple[Example, ...] = ()
    if config.data.dev is not None:
        found = _read(config, (config.data.dev,), say=say)
        dev = tuple(found[i] for i in range(min(len(found), config.validation.prompts)))
    plan = Plan(examples, config, world=world, mask_token_id=mask_token_id)
    say(
        f"{len(examples)} examples to train on, {len(dev)} to validate with: {plan.total_steps} steps of "
        f"{config.batch.global_size}, {plan.steps_per_epoch} an epoch"
    )
    files = (*config.data.train, *(() if config.data.dev is None else (config.data.dev,)))
    return Prepared(drafter=drafter, plan=plan, dev=dev, files_sha256=_files_sha256(files))


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
    digest = hashlib.sha256(json.dumps(prepared.files_sha256, sort_keys=True).encode()).hexdigest()
    checkpoints = Checkpoints(
        out / "checkpoints",
        keep=config.checkpoints.keep,
        world=world,
        key=resume_key(config, world=world, data_sha256=digest),
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


def _training_examples(config: TrainConfig, drafter: DrafterPlan, *, say: Say) -> Examples:
    if config.data.synthetic is None:
        return _read(config, config.data.train, say=say)
    return SyntheticExamples(
        count=config.data.synthetic,
        length=config.data.max_length,
        num_ids=drafter.network.vocab_size,
        mask_token_id=drafter.d3d_config.mask_token_id,
        seed=config.seed,
    )


def _read(config, paths, *, say):
    from train.dataset import stub_dataset

    return stub_dataset(paths, config.model.path, config.data.max_length)


def _files_sha256(paths: tuple[str, ...]) -> dict[str, str]:
    digests = {}
    for path in paths:
        with Path(path).open("rb") as file:
            digests[Path(path).name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
