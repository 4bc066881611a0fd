"""The DeepSpeed engine of a run: optimiser, learning rate, and the model split as the ZeRO stage says.

Owns how they are built from the config, and the two things that a run must not get wrong silently: that the
master weights are fp32, and that 8-bit AdamW keeps 8-bit state. Micro-batches and steps are `guard`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bitsandbytes
import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from train.config import OptimizerSection, TrainConfig, deepspeed_config
from train.distributed import World
from train.errors import TrainingError

# Below this many values bitsandbytes keeps a tensor's moments in fp32 (its `min_8bit_size`).
MIN_8BIT_SIZE = 4096


def build_engine(
    model: torch.nn.Module, config: TrainConfig, *, world: World, total_steps: int
) -> DeepSpeedEngine:
    """Hand a model to DeepSpeed, which keeps fp32 copies of its weights and steps those."""
    optimizer = _optimizer(model, config.optimizer)
    settings = config.optimizer
    schedule = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer,
        num_warmup_steps=round(settings.warmup * total_steps),
        num_training_steps=total_steps,
        min_lr=settings.min_lr,
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config=deepspeed_config(config, world_size=world.size),
        dist_init_required=False,
    )
    if config.zero.stage == 0:
        # Its optimiser has taken a step of zeros to allocate state, which would shift Adam's bias correction.
        optimizer.state.clear()
    if config.precision == "fp32" and config.zero.stage in (1, 2):
        engine.optimizer.check_grad_overflow = True  # DeepSpeed has a setting for it in bf16 alone
    return engine


def check_optimizer_state(engine: DeepSpeedEngine, settings: OptimizerSection) -> None:
    """Refuse state of another kind than the config names. To be called on every rank after the first step.

    Raises:
        TrainingError: fp32 moments under `adamw8bit`, or master weights that are not fp32.
    """
    for parameter, state in engine.basic_optimizer.state.items():
        if parameter.dtype != torch.float32:
            raise TrainingError(f"the optimiser steps {parameter.dtype} weights, they must be fp32")
        moments = {name: value for name, value in state.items() if name in ("state1", "state2")}
        if settings.name != "adamw8bit" or parameter.numel() < MIN_8BIT_SIZE:
            continue
        kinds = {name: str(value.dtype) for name, value in moments.items()}
        if set(kinds.values()) != {"torch.uint8"}:
            raise TrainingError(
                f"optimizer.name is 'adamw8bit' but the state of a tensor of {parameter.numel()} values is "
                f"{kinds or 'absent'}, it must be uint8: choose 'adamw'"
            )


def master_weights(engine: DeepSpeedEngine) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and fp32 master weights, whole, of every trained parameter. All ranks must go through all."""
    named = [(name, weight) for name, weight in engine.module.named_parameters() if weight.requires_grad]
    if engine.zero_optimization_stage() == 0:
        masters = [master for group in engine.optimizer.fp32_groups for master in group]
        yield from ((name, master) for (name, _), master in zip(named, masters, strict=True))
        return
    for name, weight in named:
        yield name, safe_get_full_fp32_param(weight)


def bytes_of_state(engine: DeepSpeedEngine) -> int:
    """Bytes of weights, fp32 copies and optimiser state on this rank: about what its checkpoint takes."""
    tensors: list[torch.Tensor] = [
        getattr(weight, "ds_tensor", weight) for weight in engine.module.parameters()
    ]
    for parameter, state in engine.basic_optimizer.state.items():
        tensors += [parameter, *(value for value in state.values() if torch.is_tensor(value))]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _optimizer(model: torch.nn.Module, settings: OptimizerSection) -> torch.optim.Optimizer:
    kinds: dict[str, Any] = {"adamw8bit": bitsandbytes.optim.AdamW8bit, "adamw": torch.optim.AdamW}
    optimizer: torch.optim.Optimizer = kinds[settings.name](
        _groups(model, weight_decay=settings.weight_decay),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    return optimizer


def _groups(model: torch.nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """All parameters as one group (one flat partition under ZeRO); norms apart if there is weight decay."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if weight_decay == 0:
        return [{"params": trained}]
    return [
        {"params": [weight for weight in trained if weight.dim() > 1]},
        {"params": [weight for weight in trained if weight.dim() <= 1], "weight_decay": 0.0},
    ]
