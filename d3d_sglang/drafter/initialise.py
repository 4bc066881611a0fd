"""Makes a drafter folder out of an ordinary causal LM: some of its layers, a mask token, a `d3d_config`.

Owns the choice of layers and of the mask token; `export` writes. The result is untrained as a drafter and
still loads as a plain language model. Imports no command-line code; progress goes to a callable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from d3d_sglang.drafter.checkpoint import (
    CheckpointError,
    DrafterCheckpoint,
    check_family,
    check_mask_token,
    check_pair,
    check_vocabulary,
    read_drafter,
)
from d3d_sglang.drafter.export import (
    check_written,
    folder_beside,
    load_weights,
    public_name,
    put_in_place,
    write_files,
)
from d3d_sglang.drafter.mask_token import choose_mask_token
from d3d_sglang.drafter.vocabulary import Vocabulary, read_vocabulary
from d3d_sglang.drafter_config import DrafterConfig, ThinkingMode, default_coverage

Progress = Callable[[str], None]


@dataclass(frozen=True)
class DrafterPlan:
    """What to make: the arguments of `d3d init-drafter`.

    Attributes:
        source: folder or model id of the causal LM.
        layers: layers of the source to keep, ascending; None keeps all.
        mask_token_id: None chooses a reserved id.
        target: folder or model id whose vocabulary must be the same; None checks nothing.
        dtype: of the stored weights; None keeps the source's.
        coverage: None takes the default for the block size.
        overwrite: replace an earlier drafter at `out`.
    """

    source: str
    out: Path
    block_size: int
    fanout: int
    coverage: int | None = None
    layers: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    target: str | None = None
    dtype: torch.dtype | None = None
    thinking_mode: ThinkingMode | None = None
    overwrite: bool = False


def init_drafter(plan: DrafterPlan, *, progress: Progress) -> DrafterCheckpoint:
    """Make, write and read back a drafter.

    Raises:
        ValueError: a setting that is not allowed, a source that cannot be a drafter, another vocabulary than
            the target's, a destination in use, or weights that did not come back as they were written.
    """
    _check_destination(plan)
    progress(f"reading {plan.source}")
    config = _source_config(plan.source)
    vocabulary = read_vocabulary(plan.source)
    d3d_config = _drafter_config(plan, config, vocabulary)
    if plan.target is not None:
        progress(f"comparing its vocabulary with {plan.target}")
        check_vocabulary(vocabulary, read_vocabulary(plan.target), drafter=plan.source, target=plan.target)
    progress(f"mask token: id {d3d_config.mask_token_id} {_describe(d3d_config.mask_token_id, vocabulary)}")
    progress("loading the weights")
    model = load_weights(plan.source, dtype=plan.dtype or "auto")
    keep_layers(model, d3d_config.source_layers)
    progress(f"kept {len(d3d_config.source_layers)} of {config.num_hidden_layers} layers")
    with folder_beside(plan.out) as folder:
        progress(f"writing {plan.out}")
        sha256 = write_files(
            folder,
            model,
            d3d_config,
            tokenizer=plan.source,
            provenance={"source": public_name(plan.source)},
        )
        progress("reading it back")
        check_written(folder, sha256, dtype=model.dtype)
        drafter = read_drafter(folder)
        if plan.target is not None:
            for warning in check_pair(drafter, plan.target):
                progress(f"warning: {warning}")
        put_in_place(folder, plan.out)
    return read_drafter(plan.out)


def keep_layers(model: Any, layers: tuple[int, ...]) -> None:
    """Cut a causal LM down to `layers` (ascending), renumbered from 0, in place."""
    decoder = model.get_decoder()
    decoder.layers = torch.nn.ModuleList(decoder.layers[i] for i in layers)
    for i, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = i
    config = model.config
    config.num_hidden_layers = len(layers)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        config.layer_types = [layer_types[i] for i in layers]


def _check_destination(plan: DrafterPlan) -> None:
    out = plan.out
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file, it must be a folder or not exist")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not plan.overwrite:
        raise ValueError(f"--out {out} is not empty: choose another folder, or give --overwrite")
    for kept in filter(None, (plan.source, plan.target)):
        if Path(kept).resolve().is_relative_to(out.resolve()):
            raise ValueError(f"--out {out} holds {kept}, --overwrite would delete it: choose another folder")
    if not (out / "config.json").is_file():
        raise ValueError(
            f"--out {out} holds something else than a model (no config.json), --overwrite does not delete "
            "it: choose another folder"
        )


def _source_config(source: str) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"--from {source}: give a model folder or a model id: {error}") from error
    check_family(config, where=f"--from {source}")
    return config


def _drafter_config(plan: DrafterPlan, config: PretrainedConfig, vocabulary: Vocabulary) -> DrafterConfig:
    num_layers, num_rows = config.num_hidden_layers, config.vocab_size
    layers = tuple(range(num_layers)) if plan.layers is None else plan.layers
    if not layers or not all(0 <= i < num_layers for i in layers):
        raise ValueError(
            f"--layers is {','.join(map(str, layers))}: it must name layers of {plan.source}, "
            f"from 0 to {num_layers - 1}"
        )
    mask_token_id = plan.mask_token_id
    if mask_token_id is None:
        mask_token_id = choose_mask_token(vocabulary, num_embeddings=num_rows)
    check_mask_token(mask_token_id, vocabulary, num_embeddings=num_rows, where=plan.source)
    coverage = default_coverage(plan.block_size) if plan.coverage is None else plan.coverage
    fields = {
        "block_size": plan.block_size,
        "mask_token_id": mask_token_id,
        "target_model": None if plan.target is None else public_name(plan.target),
        "source_layers": list(layers),
        "thinking_mode": plan.thinking_mode,
        "async": {"coverage": coverage, "fanout": plan.fanout},
    }
    return DrafterConfig.from_dict(fields, where="init-drafter")


def _describe(mask_token_id: int, vocabulary: Vocabulary) -> str:
    content = vocabulary.added.get(mask_token_id)
    return "(an embedding row the tokenizer does not use)" if content is None else repr(content)
