"""Makes the scripted drafter visible to one server: the variables to start it with.

SGLang finds plugins by their metadata, so a folder with nothing but an entry point is put on the server's
path; the environment of the caller stays as it is.
"""

from __future__ import annotations

import os
from pathlib import Path

SCRIPT_ENV = "D3D_TEST_SCRIPT"
ROUNDS_ENV = "D3D_TEST_ROUNDS"

_CHECKOUT = Path(__file__).resolve().parents[3]
_METADATA = "Metadata-Version: 2.1\nName: d3d-scripted\nVersion: 0\n"
_ENTRY_POINTS = "[sglang.srt.plugins]\nd3d_scripted = tests.e2e.scripted.plugin:register\n"


def scripted_environment(folder: Path, *, script: Path, rounds: Path) -> dict[str, str]:
    """Variables for a server that drafts by the file `script` and logs its rounds to the file `rounds`.

    Args:
        folder: a folder of the caller's that must outlive the server; the entry point is written to it.
    """
    metadata = folder / "d3d_scripted-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(_METADATA)
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
    path = [str(folder), str(_CHECKOUT), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        SCRIPT_ENV: str(script),
        ROUNDS_ENV: str(rounds),
    }
