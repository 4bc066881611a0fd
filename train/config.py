"""What a training run is: one YAML file, typed and checked before anything is loaded.

Owns the fields, their defaults, what is allowed, and the numbers that follow from them. Unknown keys are
refused. A message names the field, the value and what is allowed:

    config = load_config("train/recipes/smoke.yaml", overrides=["optimizer.lr=3e-4"])

DeepSpeed's own settings are derived from it (`deepspeed_config`), so there is no second file to keep in step.
Knows nothing of models, data or devices, and imports no torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from d3d_sglang.drafter_config import MIN_BLOCK_SIZE, ThinkingMode

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
PathText = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]


class _Section(BaseModel):
    # strict: `rows: "4"` or `compile: 1` is a mistake. Numbers without a fraction may stand for floats.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSection(_Section):
    """Where the drafter starts and what it is for.

    Attributes:
        path: folder or id of a causal LM with the target's tokenizer, or of a drafter.
        target: folder or id of the target; its vocabulary must be the same.
        layers: layers of `path` to keep, ascending; None keeps all.
        block_size: B, the anchor included.
        mask_token_id: None takes the drafter's, or else a reserved id of the tokenizer.
        random_init: keep the architecture of `path` and draw its weights anew.
        shape: a transformers config (model_type and more) in place of that of `path`; needs `random_init`.
        thinking_mode: whether the target's answers were made with thinking.
    """

    path: PathText
    target: PathText
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    block_size: Annotated[int, Field(ge=MIN_BLOCK_SIZE)] = 16
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    random_init: bool = False
    shape: dict[str, Any] | None = None
    thinking_mode: ThinkingMode | None = None

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
        if self.layers is not None and (not self.layers or list(self.layers) != sorted(set(self.layers))):
            raise ValueError("layers must name different layers, ascending, or be null for all")
        if self.shape is not None and not self.random_init:
            raise ValueError("shape is given without random_init: true: stored weights have their own shape")
        if self.shape is not None and self.layers is not None:
            raise ValueError("shape and layers are both given: set shape.num_hidden_layers instead")
        return self


class DataSection(_Section):
    """The target's answers.

    Attributes:
        train: files of rows {"id", "conversations"}.
        synthetic: this many rows of random tokens, `max_length` each, in place of `train`: to measure speed.
        dev: the target's greedy answers to prompts never trained on; None: no validation.
        max_length: tokens of prompt and answer together; longer answers are cut, longer prompts refused.
        max_dropped: share of answers that may be unusable before the run stops.
        cache: folder for the tokenised data; None takes `tokens` in `out`.
    """

    train: tuple[PathText, ...] = ()
    synthetic: Count | None = None
    dev: PathText | None = None
    max_length: Annotated[int, Field(ge=8)] = 2048
    max_dropped: Share = 0.05
    cache: PathText | None = None

    @model_validator(mode="after")
    def _check(self) -> DataSection:
        if bool(self.train) == (self.synthetic is not None):
            raise ValueError("train must name at least one file, or else synthetic be given, and not both")
        return self


class PackingSection(_Section):
    """Blocks of a row (paper, section 3.2).

    Attributes:
        num_anchors: K.
        gamma: decay of the position weights.
        multiple_of: the context of a row is padded to a multiple of it.
    """

    num_anchors: Count = 128
    gamma: Positive = 7.0
    multiple_of: Count = 64


class LossSection(_Section):
    """`ar_weight` is lambda of equation 7: the weight of the next-token loss beside the block loss."""

    ar_weight: NotNegative = 1.0


class OptimizerSection(_Section):
    """AdamW with a cosine from `lr` to `min_lr` behind a linear warm-up.

    Attributes:
        name: `adamw8bit` keeps the moments in 8 bits (bitsandbytes), `adamw` in fp32.
        warmup: share of all steps.
        clip: largest norm of the whole gradient.
    """

    name: Literal["adamw8bit", "adamw"] = "adamw8bit"
    lr: Positive = 1e-5
    min_lr: NotNegative = 1e-6
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    clip: Positive = 1.0
    warmup: Share = 0.01

    @model_validator(mode="after")
    def _check(self) -> OptimizerSection:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr is {self.min_lr}, it must be at most lr, {self.lr}")
        return self


class BatchSection(_Section):
    """Rows of an optimiser step over all ranks (`global_size`), and of one forward pass (`rows`)."""

    global_size: Count = 16
    rows: Count = 1

    def accumulation(self, world_size: int) -> int:
        """Forward passes of a rank in one optimiser step.

        Raises:
            ValueError: the global size does not divide.
        """
        passes, rest = divmod(self.global_size, self.rows * world_size)
        if rest or not passes:
            raise ValueError(
                f"batch.global_size is {self.global_size}: it must be a multiple of batch.rows times the "
                f"number of ranks, {self.rows} x {world_size} = {self.rows * world_size}"
            )
        return passes


class ZeroSection(_Section):
    """DeepSpeed ZeRO: what is split over the ranks.

    Attributes:
        stage: 0 nothing, 1 optimiser state and fp32 weights, 2 gradients too, 3 weights too.
        bucket: elements reduced or gathered in one call.
    """

    stage: Literal[0, 1, 2, 3] = 1
    bucket: Count = 200_000_000


class LimitsSection(_Section):
    """Where a run ends, whichever comes first.

    Attributes:
        epochs: passes over the data; the learning rate falls over all of them, or over `max_steps`.
        max_steps: optimiser steps of the whole run.
        max_minutes: of this launch alone, loading not counted: it saves and ends, the next launch goes on.
        max_skipped: steps in a row that may be skipped for a gradient that is not finite.
    """

    epochs: Count = 3
    max_steps: Count | None = None
    max_minutes: Positive | None = None
    max_skipped: Count = 5


class ValidationSection(_Section):
    """Exact greedy tau on the development answers.

    Attributes:
        every: steps between two validations.
        prompts: answers used, from the start of the file.
        batch_tokens: tokens of a forward pass, context and blocks.
        coverage, fanout: C and F of the hit rate that is reported, and of the exported drafter.
    """

    every: Count = 500
    prompts: Count = 128
    batch_tokens: Count = 65_536
    coverage: Count = 12
    fanout: Count = 2


class CheckpointsSection(_Section):
    """`every` steps a checkpoint to resume from; the newest `keep` stay."""

    every: Count = 500
    keep: Count = 2


class LoggingSection(_Section):
    """Steps between two lines of figures, and where they go beside the screen."""

    every: Count = 10
    tensorboard: bool = True
    wandb_project: str | None = None


class TrainConfig(_Section):
    """A whole run.

    Attributes:
        out: folder that receives everything it writes.
        precision: of weights, activations and gradients; fp32 copies of the weights are stepped either way.
            `fp32` is for CPUs, many of which multiply bf16 ten times slower.
    """

    out: PathText
    seed: Annotated[int, Field(ge=0)] = 0
    model: ModelSection
    data: DataSection
    packing: PackingSection = PackingSection()
    loss: LossSection = LossSection()
    optimizer: OptimizerSection = OptimizerSection()
    batch: BatchSection = BatchSection()
    zero: ZeroSection = ZeroSection()
    limits: LimitsSection = LimitsSection()
    validation: ValidationSection = ValidationSection()
    checkpoints: CheckpointsSection = CheckpointsSection()
    logging: LoggingSection = LoggingSection()
    attention: Literal["sdpa", "flex", "flashinfer", "triton"] = "flashinfer"
    precision: Literal["bf16", "fp32"] = "bf16"
    activation_checkpointing: bool = False
    compile: bool = False

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.compile and self.zero.stage == 3:
            raise ValueError(
                "compile is true with zero.stage 3: layers are gathered by hooks, use stage 0 to 2"
            )
        if self.precision == "fp32" and self.zero.stage == 0:
            raise ValueError(
                "precision is fp32 with zero.stage 0: DeepSpeed then does not check the gradient, use 1"
            )
        if self.validation.coverage > self.model.block_size:
            raise ValueError(
                f"validation.coverage is {self.validation.coverage}, it must be at most "
                f"model.block_size, {self.model.block_size}"
            )
        return self


def load_config(path: str | Path, *, overrides: Iterable[str] = ()) -> TrainConfig:
    """Read a YAML file, put `a.b=value` overrides over it (values are YAML too), and check the result.

    Raises:
        ValueError: the file cannot be read, or one line for each field that is wrong.
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"the config {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"the config {path} holds {type(content).__name__}, it must be a YAML mapping")
    for override in overrides:
        _override(content, override)
    try:
        # As JSON: there a list may stand for a tuple, while strictness forbids it in Python.
        return TrainConfig.model_validate_json(json.dumps(content, default=str))
    except ValidationError as error:
        lines = [_render(detail) for detail in error.errors()]
        raise ValueError("\n".join([f"the config {path} has {len(lines)} error(s):", *lines])) from error


def dump_config(config: TrainConfig) -> str:
    """The config as YAML, every default spelled out; `load_config` of it gives an equal object."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def deepspeed_config(config: TrainConfig, *, world_size: int) -> dict[str, Any]:
    """What DeepSpeed is told. The optimiser and the learning rate are handed to it as objects."""
    zero = config.zero
    settings: dict[str, Any] = {
        "train_batch_size": config.batch.global_size,
        "train_micro_batch_size_per_gpu": config.batch.rows,
        "gradient_accumulation_steps": config.batch.accumulation(world_size),
        "gradient_clipping": config.optimizer.clip,
        "zero_allow_untested_optimizer": True,  # bitsandbytes is not on its list
        "zero_optimization": {"stage": zero.stage},
        # Its stopwatch waits for the device at every forward pass.
        "timers": {"throughput": {"enabled": False}},
    }
    if config.precision == "bf16":
        # fp32 master weights at every stage; its check of the gradient skips a step on all ranks together.
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
    if zero.stage in (1, 2):
        settings["zero_optimization"] |= {
            "reduce_bucket_size": zero.bucket,
            "allgather_bucket_size": zero.bucket,
        }
    if zero.stage == 3:
        settings["zero_optimization"] |= {
            "reduce_bucket_size": zero.bucket,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    return settings


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-5 is a number: YAML 1.1 asks for 1.0e-5."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+\Z"), list("-+0123456789")
)


def _override(content: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ValueError(f"--set {override}: it must be a field and a value, such as optimizer.lr=3e-4")
    section = content
    for key in keys[:-1]:
        inner = section.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ValueError(f"--set {override}: {key} holds {inner!r}, it is not a section")
        section = inner
    try:
        section[keys[-1]] = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {override}: the value is not YAML: {error}") from error


def _render(detail: Any) -> str:
    """One error of pydantic as: field, value, what is allowed."""
    where = ".".join(str(part) for part in detail["loc"]) or "the config"
    if detail["type"] == "extra_forbidden":
        return f"  {where} is unknown{_known(detail['loc'][:-1])}"
    if detail["type"] == "missing":
        return f"  {where} is missing"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":
        return f"  {where}: {message}"
    return f"  {where} is {detail['input']!r}: {message[0].lower() + message[1:]}"


def _known(section: Sequence[str | int]) -> str:
    fields = TrainConfig.model_fields
    for key in section:
        annotation = fields[str(key)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return ""
        fields = annotation.model_fields
    return f": known are {', '.join(fields)}"
