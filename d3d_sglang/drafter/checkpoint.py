"""A drafter folder, read and checked before any weight is loaded.

Owns every statement about what a drafter must be: a dense causal LM of a known family, a valid `d3d_config`,
whole weight files with the tensors its config needs, a free mask token, and the target's vocabulary. Each
failure is one message that says what to do. Imports transformers, never sglang.

    drafter = read_drafter("my-drafter")
    for warning in check_pair(drafter, "my-target"): print(warning)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from d3d_sglang.drafter.mask_token import mask_token_problem
from d3d_sglang.drafter.vocabulary import Vocabulary, read_vocabulary
from d3d_sglang.drafter.weight_files import StoredTensor, WeightFiles, read_weight_files
from d3d_sglang.drafter_config import CONFIG_KEY, DrafterConfig

FAMILIES = ("llama", "qwen2", "qwen3")  # model types whose attention is one call we can swap
ARCHITECTURE_SUFFIX = "ForCausalLM"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class CheckpointError(ValueError):
    """A drafter folder, or a drafter and its target together, cannot be served; one paragraph says why."""

    def __init__(self, message: str) -> None:
        # Messages of libraries, which some of ours quote, run over several lines.
        super().__init__(" ".join(message.split()))


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A drafter folder that passed every check.

    Attributes:
        vocab_size: embedding rows, padding rows included.
        max_position_embeddings: longest context in tokens.
        dtype: of the stored embedding.
    """

    path: Path
    config: PretrainedConfig
    d3d_config: DrafterConfig
    vocab_size: int
    max_position_embeddings: int
    num_layers: int
    dtype: torch.dtype
    weight_files: tuple[Path, ...]
    vocabulary: Vocabulary

    @property
    def has_length_dependent_rotary(self) -> bool:
        """Whether rotary frequencies follow the length seen so far: not possible in a captured graph."""
        return (self.config.rope_parameters or {}).get("rope_type") in _LENGTH_DEPENDENT_ROPE


def read_drafter(path: str | Path) -> DrafterCheckpoint:
    """Read a drafter folder and check all of it.

    Raises:
        CheckpointError: the first thing found wrong, and what to do about it.
    """
    try:
        return _read_drafter(Path(path))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def check_pair(
    drafter: DrafterCheckpoint, target_path: str | Path, *, tokenizer_path: str | Path | None = None
) -> tuple[str, ...]:
    """Check that a drafter speaks the vocabulary of a target.

    Embedding rows beyond the tokenizer may differ in number. `tokenizer_path` defaults to `target_path`.

    Returns:
        Warnings: what works but may cost acceptance.

    Raises:
        CheckpointError: another vocabulary size or token map, or a mask token that the target uses.
    """
    try:
        config = AutoConfig.from_pretrained(target_path, trust_remote_code=False)
        theirs = read_vocabulary(tokenizer_path or target_path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the target {target_path} cannot be read, give a model folder or a model id: {error}"
        ) from error
    check_vocabulary(drafter.vocabulary, theirs, drafter=str(drafter.path), target=str(target_path))
    num_rows = int(config.get_text_config().vocab_size)
    needed = theirs.num_ids
    if min(drafter.vocab_size, num_rows) < needed:
        raise CheckpointError(
            f"the tokenizer has {needed} ids, the drafter {drafter.path} has {drafter.vocab_size} embedding "
            f"rows and the target {target_path} {num_rows}: both need a row for every id"
        )
    check_mask_token(
        drafter.d3d_config.mask_token_id, theirs, num_embeddings=drafter.vocab_size, where=target_path
    )
    return tuple(_pair_warnings(drafter, target_path, theirs, num_rows=num_rows))


def check_vocabulary(ours: Vocabulary, theirs: Vocabulary, *, drafter: str, target: str) -> None:
    """Refuse two vocabularies that are not the same token -> id map.

    Raises:
        CheckpointError: with the first ids that differ.
    """
    differences = ours.differences(theirs)
    if differences:
        raise CheckpointError(
            f"the drafter {drafter} and the target {target} have different vocabularies "
            f"({len(ours.token_to_id)} and {len(theirs.token_to_id)} tokens; drafter against target: "
            f"{'; '.join(differences)}). Drafted ids would mean other tokens to the target: "
            "use a drafter made from a model with the target's tokenizer"
        )


def check_mask_token(
    mask_token_id: int, vocabulary: Vocabulary, *, num_embeddings: int, where: str | Path
) -> None:
    """Refuse a mask token that can occur in text.

    Raises:
        CheckpointError: naming the id and the reason.
    """
    problem = mask_token_problem(mask_token_id, vocabulary, num_embeddings=num_embeddings)
    if problem is not None:
        raise CheckpointError(f"mask_token_id {mask_token_id} {problem} ({where})")


def check_family(config: PretrainedConfig, *, where: str | Path) -> None:
    """Refuse a model whose network cannot be a drafter.

    Raises:
        CheckpointError: not a causal LM of a supported family, quantised, or with windowed layers.
    """
    names = list(getattr(config, "architectures", None) or [])
    if len(names) != 1 or not names[0].endswith(ARCHITECTURE_SUFFIX):
        raise CheckpointError(
            f"{where}: architectures is {names}, it must be one class ending in {ARCHITECTURE_SUFFIX}: "
            "a drafter is an ordinary causal language model"
        )
    if config.model_type not in FAMILIES or names[0] != MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]:
        supported = ", ".join(
            f"{family} ({MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]})" for family in FAMILIES
        )
        raise CheckpointError(
            f"{where}: {names[0]} of model_type {config.model_type!r} is not supported as a drafter, "
            f"supported are the dense families {supported}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(
            f"{where}: quantization_config is set, a drafter must be stored unquantised (fp32, fp16 or bf16)"
        )
    windowed = sorted(set(getattr(config, "layer_types", None) or []) - {"full_attention"})
    if windowed:
        raise CheckpointError(
            f"{where}: layer_types holds {', '.join(windowed)}, a drafter needs full_attention in every layer"
        )


def _read_drafter(folder: Path) -> DrafterCheckpoint:
    raw = _read_config_json(folder)
    config = _parse_config(folder, raw)
    check_family(config, where=folder)
    if CONFIG_KEY not in raw:
        raise CheckpointError(
            f"{folder} is a language model but not a drafter: its config.json has no {CONFIG_KEY}. "
            f"Make a drafter from it: d3d init-drafter --from {folder} --out DIR --block-size 16"
        )
    d3d_config = DrafterConfig.from_dict(raw[CONFIG_KEY], where=str(folder / "config.json"))
    _check_source_layers(folder, d3d_config, num_layers=config.num_hidden_layers)
    files = read_weight_files(folder)
    embedding = _check_tensors(folder, raw, config, files)
    vocabulary = read_vocabulary(folder)
    check_mask_token(d3d_config.mask_token_id, vocabulary, num_embeddings=config.vocab_size, where=folder)
    return DrafterCheckpoint(
        path=folder,
        config=config,
        d3d_config=d3d_config,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        dtype=_DTYPES[embedding.dtype],
        weight_files=files.paths,
        vocabulary=vocabulary,
    )


def _read_config_json(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise CheckpointError(
            f"the drafter folder {folder} does not exist: give a local folder, made with "
            "`d3d init-drafter` or downloaded with `hf download`"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no config.json: a drafter is a folder written by `d3d init-drafter`"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): write or download it again") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object, it holds {type(raw).__name__}")
    return raw


def _parse_config(folder: Path, raw: Mapping[str, Any]) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers validates with exceptions of several kinds
        raise CheckpointError(
            f"{folder / 'config.json'} (model_type {raw.get('model_type')!r}) is not a config that "
            f"transformers can read: {error}"
        ) from error


def _check_source_layers(folder: Path, d3d_config: DrafterConfig, *, num_layers: int) -> None:
    kept = d3d_config.source_layers
    if kept and len(kept) != num_layers:
        raise CheckpointError(
            f"{folder / 'config.json'}: {CONFIG_KEY}.source_layers lists {len(kept)} layers, "
            f"num_hidden_layers is {num_layers}: they must agree"
        )


def _check_tensors(
    folder: Path, raw: Mapping[str, Any], config: PretrainedConfig, files: WeightFiles
) -> StoredTensor:
    """Check that every tensor of the network is stored, in its shape; returns the input embedding's entry."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    # Parameters only: buffers, such as rotary frequencies, are computed. A tied head is listed once.
    needed = {name: tensor for name, tensor in model.named_parameters() if tensor is not head}
    for name, tensor in needed.items():
        _check_stored(folder, name, tuple(tensor.shape), files)
    _check_head(folder, raw, tuple(head.shape), files)
    name = next(name for name, tensor in model.named_parameters() if tensor is embedding)
    return files.tensors[name]


def _check_head(folder: Path, raw: Mapping[str, Any], shape: tuple[int, ...], files: WeightFiles) -> None:
    if raw.get("tie_word_embeddings") is True:
        return
    if "lm_head.weight" not in files.tensors:
        raise CheckpointError(
            f"{folder} stores no lm_head.weight, and its config.json does not say tie_word_embeddings: true. "
            "If the output head is the input embedding, say so there; otherwise the weights are incomplete"
        )
    _check_stored(folder, "lm_head.weight", shape, files)


def _check_stored(folder: Path, name: str, shape: tuple[int, ...], files: WeightFiles) -> None:
    stored = files.tensors.get(name)
    if stored is None:
        raise CheckpointError(
            f"{folder}: the weights lack {name}, which config.json asks for: they are incomplete"
        )
    if stored.shape != shape:
        hint = ""
        if 0 in stored.shape:
            hint = ". An empty tensor comes from saving under ZeRO-3 without gathering the weights first"
        raise CheckpointError(
            f"{folder}: {name} in {stored.file} has shape {list(stored.shape)}, config.json asks for "
            f"{list(shape)}{hint}"
        )
    if stored.dtype not in _DTYPES:
        raise CheckpointError(
            f"{folder}: {name} in {stored.file} is stored as {stored.dtype}, allowed are {', '.join(_DTYPES)}"
        )


def _pair_warnings(
    drafter: DrafterCheckpoint, target_path: str | Path, target: Vocabulary, *, num_rows: int
) -> list[str]:
    warnings = []
    d3d_config = drafter.d3d_config
    made_for, given = d3d_config.target_model, Path(target_path).name
    if made_for is not None and Path(made_for).name.lower() != given.lower():
        warnings.append(f"the drafter was made for the target {made_for!r}, it is used with {given!r}")
    if drafter.vocab_size < num_rows:
        warnings.append(
            f"the drafter has {drafter.vocab_size} embedding rows, the target {num_rows}: it cannot read ids "
            f"from {drafter.vocab_size} on (the tokenizer has none of them)"
        )
    has_switch = "enable_thinking" in target.chat_template
    mode = d3d_config.thinking_mode
    if has_switch and mode is None:
        warnings.append("the target can think or not, the drafter does not say which it was trained for")
    if has_switch and mode == "off":
        warnings.append(
            "the drafter was trained for thinking off: send chat_template_kwargs {'enable_thinking': false}, "
            "other requests are drafted worse"
        )
    if mode is not None and not has_switch:
        warnings.append(
            f"the drafter was trained for thinking {mode}, the target's chat template has no such mode"
        )
    return warnings
