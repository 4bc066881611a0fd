"""Test plugin: a D3D server with its real drafter writes its rounds down, as one with a script does."""

from __future__ import annotations

import os
from pathlib import Path

from tests.e2e.scripted.environment import ROUNDS_ENV

_CHECKOUT = Path(__file__).resolve().parents[2]
_METADATA = "Metadata-Version: 2.1\nName: d3d-logged\nVersion: 0\n"
_ENTRY_POINTS = "[sglang.srt.plugins]\nd3d_logged = tests.e2e.logged:register\n"


def logged_environment(folder: Path, *, rounds: Path) -> dict[str, str]:
    """Variables for a server that logs its rounds to the file `rounds`; `folder` must outlive it."""
    metadata = folder / "d3d_logged-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(_METADATA)
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
    path = [str(folder), str(_CHECKOUT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path)), ROUNDS_ENV: str(rounds)}


def register() -> None:
    """Called by SGLang in each of its processes, before any of them imports the worker."""
    # Needs SGLang, which not every process that imports this module has.
    from d3d_sglang.drafter.executor import DrafterExecutor
    from d3d_sglang.integration import drafter_setup
    from tests.e2e.scripted.round_log import LoggedDrafting

    LoggedDrafting.path = Path(os.environ[ROUNDS_ENV])
    drafter_setup.Drafting = LoggedDrafting  # type: ignore[misc]
    DrafterExecutor.scene_number = lambda _self, _row: None  # type: ignore[attr-defined]
