"""The drafter a run starts from: its network and weights, and the `d3d_config` its exports will have.

Owns every check that can be made before the data is read: the family of the network, the mask token, and that
drafter and target have the same token -> id map. `plan_drafter` reads no weights, `load_drafter` does.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from d3d_sglang.drafter.checkpoint import CheckpointError, check_family, check_mask_token, check_vocabulary
from d3d_sglang.drafter.export import public_name
from d3d_sglang.drafter.initialise import keep_layers
from d3d_sglang.drafter.mask_token import choose_mask_token
from d3d_sglang.drafter.vocabulary import Vocabulary, read_vocabulary
from d3d_sglang.drafter_config import CONFIG_KEY, DrafterConfig
from train.config import ModelSection, TrainConfig
from train.model import TrainModel, load_lm


@dataclass(frozen=True)
class DrafterPlan:
    """What will be trained.

    Attributes:
        network: the transformers config, before layers are removed.
        layers: those of `network` that are kept.
    """

    section: ModelSection
    network: PretrainedConfig
    layers: tuple[int, ...]
    d3d_config: DrafterConfig


def plan_drafter(config: TrainConfig) -> DrafterPlan:
    """Read and check everything but the weights.

    Raises:
        ValueError: a model that cannot be a drafter, a mask token in use, layers that do not exist, or
            another vocabulary than the target's.
    """
    section = config.model
    network = _network(section)
    vocabulary = read_vocabulary(section.path)
    theirs = read_vocabulary(section.target)
    check_vocabulary(vocabulary, theirs, drafter=section.path, target=section.target)
    if network.vocab_size < vocabulary.num_ids:
        raise CheckpointError(
            f"the network has {network.vocab_size} embedding rows, the tokenizer of {section.path} "
            f"{vocabulary.num_ids} ids: it needs a row for every id"
        )
    earlier = getattr(network, CONFIG_KEY, None)
    drafter = None if earlier is None else DrafterConfig.from_dict(earlier, where=section.path)
    layers = _layers(section, num_layers=network.num_hidden_layers)
    fields = {
        "block_size": section.block_size,
        "mask_token_id": _mask_token(section, drafter, vocabulary, num_rows=network.vocab_size),
        "target_model": public_name(section.target),
        "source_layers": _source_layers(layers, drafter),
        "pruned_layers": [] if drafter is None else list(drafter.pruned_layers),
        "thinking_mode": section.thinking_mode or (None if drafter is None else drafter.thinking_mode),
        "async": {"coverage": config.validation.coverage, "fanout": config.validation.fanout},
        "provenance": {"source": public_name(section.path)},
    }
    d3d_config = DrafterConfig.from_dict(fields, where="model")
    check_mask_token(
        d3d_config.mask_token_id, theirs, num_embeddings=network.vocab_size, where=section.target
    )
    return DrafterPlan(section=section, network=network, layers=layers, d3d_config=d3d_config)


def load_drafter(plan: DrafterPlan, config: TrainConfig) -> TrainModel:
    """Load or draw the weights, on the CPU, ready to train."""
    section = plan.section
    if section.shape is None:
        lm = _load(section.path, config)
    else:
        with tempfile.TemporaryDirectory() as folder:
            plan.network.save_pretrained(folder)
            lm = _load(folder, config)
    if len(plan.layers) < plan.network.num_hidden_layers:
        keep_layers(lm, plan.layers)
    lm.requires_grad_(True).train()
    if config.activation_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.compile:
        for layer in lm.get_decoder().layers:
            layer.compile()  # layer by layer: one compilation serves all of them
    return TrainModel(
        lm,
        mask_token_id=plan.d3d_config.mask_token_id,
        attention=config.attention,
        ar_weight=config.loss.ar_weight,
        compile_loss=config.compile,
    )


def _load(path: str, config: TrainConfig) -> Any:
    return load_lm(
        path,
        dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[config.precision],
        attention=config.attention,
        random_init=config.model.random_init,
        seed=config.seed,
    )


def _network(section: ModelSection) -> PretrainedConfig:
    try:
        if section.shape is not None:
            network = AutoConfig.for_model(**section.shape)
            network.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[network.model_type]]
        else:
            network = AutoConfig.from_pretrained(section.path, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError) as error:
        name = "model.path" if section.shape is None else "model.shape"
        raise CheckpointError(
            f"{name} {section.path if section.shape is None else section.shape!r} is not a model that "
            f"transformers can read: {error}"
        ) from error
    check_family(network, where=section.path)
    return network


def _layers(section: ModelSection, *, num_layers: int) -> tuple[int, ...]:
    layers = tuple(range(num_layers)) if section.layers is None else section.layers
    if layers[-1] >= num_layers:
        raise ValueError(
            f"model.layers is {list(layers)}: it must name layers of {section.path}, 0 to {num_layers - 1}"
        )
    return layers


def _source_layers(layers: tuple[int, ...], drafter: DrafterConfig | None) -> list[int]:
    """Numbers in the model the drafter once came from."""
    if drafter is None or not drafter.source_layers:
        return list(layers)
    return [drafter.source_layers[i] for i in layers]


def _mask_token(
    section: ModelSection, drafter: DrafterConfig | None, vocabulary: Vocabulary, *, num_rows: int
) -> int:
    if section.mask_token_id is not None:
        return section.mask_token_id
    if drafter is not None:
        return drafter.mask_token_id
    return choose_mask_token(vocabulary, num_embeddings=num_rows)
