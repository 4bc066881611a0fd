"""A trained drafter as a folder that transformers loads and SGLang serves, and the record of how it was made.

Owns gathering the weights from however ZeRO has split them, and `provenance.json`. The writing, the reading
back and the comparison are `d3d_sglang.drafter.export`'s.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from d3d_sglang.drafter.checkpoint import read_drafter
from d3d_sglang.drafter.export import check_written, folder_beside, put_in_place, write_files
from d3d_sglang.drafter_config import DrafterConfig
from train.config import TrainConfig
from train.distributed import World, raise_together
from train.errors import TrainingError

PROVENANCE = "provenance.json"
_PREFIX = "lm."  # of the exported model within `TrainModel`
_PACKAGES = ("torch", "transformers", "deepspeed", "bitsandbytes", "d3d-sglang")


@dataclass(frozen=True)
class Origin:
    """What does not change during a run and goes into every export.

    Attributes:
        data_sha256: of each training and development file, by name.
        tokenizer: folder or model id.
    """

    config: TrainConfig
    d3d_config: DrafterConfig
    data_sha256: Mapping[str, str]
    tokenizer: str


def export(
    engine: DeepSpeedEngine, out: Path, *, origin: Origin, world: World, metrics: Mapping[str, Any]
) -> None:
    """Write the drafter to `out`; an earlier one goes when the new one has been read back. On all ranks.

    Raises:
        TrainingError: it cannot be written, or came back different; an earlier folder is untouched.
    """
    tensors = gathered_weights(engine)
    problem: Exception | None = None
    if world.is_first:
        try:
            _write(engine, out, tensors, origin=origin, metrics=metrics)
        except (OSError, ValueError, RuntimeError) as error:
            problem = TrainingError(f"the drafter could not be written to {out}: {error}")
            problem.__cause__ = error
    raise_together(problem, device=engine.device)


def gathered_weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """The whole state dict of the exported model; empty on other ranks than the first under ZeRO-3."""
    if engine.zero_optimization_stage() == 3:
        whole = engine._zero3_consolidated_16bit_state_dict() or {}
    else:
        whole = engine.module.state_dict()
    return {name.removeprefix(_PREFIX): tensor for name, tensor in whole.items()}


def _write(
    engine: DeepSpeedEngine,
    out: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    origin: Origin,
    metrics: Mapping[str, Any],
) -> None:
    lm = engine.module.lm
    with folder_beside(out) as folder:
        sha256 = write_files(
            folder,
            lm,
            origin.d3d_config,
            tokenizer=origin.tokenizer,
            provenance=origin.d3d_config.provenance | {key: str(value) for key, value in metrics.items()},
            tensors=tensors,
        )
        record = {
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "weights_sha256": sha256,
            "metrics": dict(metrics),
            "data_sha256": dict(origin.data_sha256),
            "versions": {name: version(name) for name in _PACKAGES},
            "commit": _commit(),
            "config": origin.config.model_dump(mode="json"),
        }
        (folder / PROVENANCE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        check_written(folder, sha256, dtype=lm.dtype)
        read_drafter(folder)
        put_in_place(folder, out)


def _commit() -> str | None:
    """The commit of this checkout, with a mark if files differ from it; None outside a repository."""
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
