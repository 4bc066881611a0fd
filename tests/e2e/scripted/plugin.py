"""Entry point of the test plugin: replaces the drafter of a D3D server by a script.

It replaces what the worker's set-up is about to make, so the package under test needs no hook for it. SGLang
only logs an exception here; callers notice by the round log, which the server then does not write.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from d3d_sglang.integration import drafter_setup
from tests.e2e.scripted.environment import ROUNDS_ENV, SCRIPT_ENV
from tests.e2e.scripted.executor import ScriptedExecutor, ScriptedModel
from tests.e2e.scripted.round_log import LoggedDrafting
from tests.e2e.scripted.script import Script


def register() -> None:
    """Called by SGLang in each of its processes, before any of them makes a worker."""
    LoggedDrafting.path = Path(os.environ[ROUNDS_ENV])
    drafter_setup.Drafting = LoggedDrafting  # type: ignore[misc]
    drafter_setup.load_model = _load_model  # type: ignore[assignment]
    drafter_setup.DrafterExecutor = partial(  # type: ignore[misc, assignment]
        ScriptedExecutor, script=Script.load(Path(os.environ[SCRIPT_ENV]))
    )


def _load_model(_checkpoint: Any, *, target_runner: Any, **_others: Any) -> ScriptedModel:
    return ScriptedModel(torch.device(target_runner.device))
