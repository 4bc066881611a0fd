"""Writes a drafter folder whole or not at all: weights, tokenizer, `config.json` with a `d3d_config`.

Owns how the files are written, the digest of the weights, and the check that what is read back is what was
written. The caller writes into a temporary folder beside the destination and puts it in place at the end:

    with folder_beside(out) as folder:
        sha256 = write_files(folder, model, d3d_config, tokenizer=source, provenance={})
        check_written(folder, sha256, dtype=model.dtype)
        put_in_place(folder, out)

Which layers, which mask token and which weights is the caller's business.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from d3d_sglang import __version__
from d3d_sglang.drafter.checkpoint import CheckpointError
from d3d_sglang.drafter.weight_files import read_weight_files
from d3d_sglang.drafter_config import CONFIG_KEY, DrafterConfig

MAX_SHARD_SIZE = "5GB"


@contextmanager
def folder_beside(out: Path) -> Iterator[Path]:
    """A temporary folder on the destination's file system, so that a rename is enough; removed at the end."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.parent / f".{out.name}.writing-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_files(
    folder: Path,
    model: Any,
    d3d_config: DrafterConfig,
    *,
    tokenizer: str | Path,
    provenance: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> str:
    """Write everything a drafter folder holds; returns the digest of the weights.

    Args:
        model: a transformers causal LM.
        tokenizer: model folder or id to take the tokenizer from.
        provenance: entries for `d3d_config.provenance`, beside the versions and the digest added here.
        tensors: the whole state dict, where the model's own parameters hold only a part of it (ZeRO-3).
    """
    tensors = model.state_dict() if tensors is None else tensors
    model.save_pretrained(folder, state_dict=dict(tensors), max_shard_size=MAX_SHARD_SIZE)
    AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False).save_pretrained(folder)
    sha256 = tensors_sha256(_stored(folder, tensors))
    known = {
        "d3d_sglang": __version__,
        "transformers": transformers.__version__,
        "weights_sha256": sha256,
    }
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    # Explicit: transformers leaves out a flag that equals its own default, which other readers may not share.
    config["tie_word_embeddings"] = (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )
    config[CONFIG_KEY] = d3d_config.to_dict() | {"provenance": known | dict(provenance)}
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in read_weight_files(folder).paths:
        path.chmod(config_path.stat().st_mode)  # safetensors writes files only their owner can read
    return sha256


def check_written(folder: Path, sha256: str, *, dtype: torch.dtype) -> None:
    """Load the weights of a folder and compare their digest with the one of what was written.

    Raises:
        CheckpointError: they cannot be loaded, or differ.
    """
    read = tensors_sha256(_stored(folder, load_weights(str(folder), dtype=dtype).state_dict()))
    if read != sha256:
        raise CheckpointError(
            f"the weights read back from {folder} (sha256 {read}) are not those written ({sha256}): check "
            "the disk, nothing was put in place"
        )


def put_in_place(folder: Path, out: Path) -> None:
    """Give a finished folder its name; an earlier one of that name is removed once it is replaced."""
    if not out.exists():
        folder.rename(out)
        return
    old = folder.with_name(folder.name + "-old")
    out.rename(old)
    folder.rename(out)
    shutil.rmtree(old)


def load_weights(source: str, *, dtype: torch.dtype | str) -> Any:
    """The causal LM of a folder or model id, whole, in evaluation mode and without gradients.

    Raises:
        CheckpointError: it cannot be loaded, or tensors are missing or have another shape.
    """
    try:
        model, info = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
    except Exception as error:  # safetensors and transformers raise several unrelated kinds
        raise CheckpointError(f"the weights of {source} cannot be loaded: {error}") from error
    missing = sorted(info["missing_keys"]) + sorted(str(x) for x in info["mismatched_keys"])
    if missing:
        raise CheckpointError(
            f"the weights of {source} are incomplete: {len(missing)} tensors are missing or have another "
            f"shape (first: {missing[0]})"
        )
    return model.eval().requires_grad_(False)


def tensors_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """Digest of names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def public_name(model: str) -> str:
    """A name that means something elsewhere: the model id, or the last part of a local path."""
    return Path(model).resolve().name if Path(model).exists() else model


def _stored(folder: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a state dict that a folder stores (a tied head is stored once)."""
    stored = read_weight_files(folder).tensors
    return {name: tensor for name, tensor in tensors.items() if name in stored}
