"""Entry point of the test plugin: replaces the drafter of a D3D server by a script.

It replaces what the worker is about to import, so the package under test needs no hook for it. SGLang only
logs an exception here; callers notice by the round log, which the server then does not write.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from d3d_sglang.drafter import rows
from d3d_sglang.integration import drafter_setup
from tests.e2e.scripted.environment import ROUNDS_ENV, SCRIPT_ENV
from tests.e2e.scripted.executor import ScriptedExecutor, ScriptedModel
from tests.e2e.scripted.round_log import LoggedRows
from tests.e2e.scripted.script import Script


def register() -> None:
    """Called by SGLang in each of its processes, before any of them imports the worker."""
    LoggedRows.path = Path(os.environ[ROUNDS_ENV])
    rows.DrafterRows = LoggedRows  # type: ignore[misc]
    drafter_setup.load_model = _load_model  # type: ignore[assignment]
    drafter_setup.make_executor = _make_executor  # type: ignore[assignment]


def _load_model(_checkpoint: Any, *, target_runner: Any, **_others: Any) -> ScriptedModel:
    return ScriptedModel(torch.device(target_runner.device))


def _make_executor(
    model: ScriptedModel, checkpoint: Any, *, num_rows: int, block_size: int, context_len: int
) -> ScriptedExecutor:
    return ScriptedExecutor(
        Script.load(Path(os.environ[SCRIPT_ENV])),
        num_rows=num_rows,
        usable=min(context_len, checkpoint.max_position_embeddings) + 2 * block_size,
        block_size=block_size,
        device=model.device,
    )
