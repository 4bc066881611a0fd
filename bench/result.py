"""Result records: what a measuring script found, where and with what, as bench/results/NAME.json.

Scripts write them, people never do. A record holds the raw runs next to the metrics computed from them, and
everything needed to repeat it: commit, hardware, versions and the exact command.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import d3d_sglang

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("bench", "results")
PACKAGES = ("torch", "sglang", "transformers")


@dataclass(frozen=True)
class Commit:
    """State of the checkout. `sha` is None outside a git repository; results do not count as changes."""

    sha: str | None
    dirty: bool


@dataclass(frozen=True)
class Hardware:
    """The machine. `load_1min` is its load average after the measurement, which is part of it."""

    cpu: str
    num_cores: int
    memory_gib: float
    gpus: tuple[str, ...]
    load_1min: float


@dataclass(frozen=True)
class Result:
    """One record. `runs` are the raw measurements, `metrics` what was computed from them."""

    name: str
    date: str  # ISO 8601, UTC
    commit: Commit
    hardware: Hardware
    versions: Mapping[str, str | None]
    command: str
    settings: Mapping[str, Any]
    metrics: Mapping[str, float | int]
    runs: Sequence[Any]


def make_result(
    name: str, *, runs: Sequence[Any], metrics: Mapping[str, float | int], settings: Mapping[str, Any]
) -> Result:
    """Describe this process's measurement; `settings` are the script's parameters."""
    return Result(
        name=name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=_commit(ROOT),
        hardware=_hardware(),
        versions=_versions(),
        command=shlex.join(["python", *sys.orig_argv[1:]]),
        settings=dict(settings),
        metrics=dict(metrics),
        runs=list(runs),
    )


def write_result(result: Result, root: Path = ROOT) -> Path:
    """Write a record below `root` and return its path; readers see the old file or the new one, whole."""
    path = root / RESULTS / f"{result.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _as_json(result)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{result.name}-", delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).chmod(0o644)
    os.replace(file.name, path)
    return path


def _as_json(result: Result) -> str:
    """Indented, but with one run a line: there may be thousands of numbers in them."""
    fields = asdict(result)
    runs = [json.dumps(run, allow_nan=False) for run in fields.pop("runs")]
    head = json.dumps(fields, indent=1, allow_nan=False).removesuffix("\n}")
    return head + ',\n "runs": [\n  ' + ",\n  ".join(runs) + "\n ]\n}\n"


def _commit(root: Path) -> Commit:
    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    changes = git("status", "--porcelain", "--", ".", f":(exclude){RESULTS.as_posix()}")
    return Commit(sha=git("rev-parse", "--verify", "HEAD"), dirty=changes != "")


def _hardware() -> Hardware:
    num_gpus = torch.cuda.device_count()
    return Hardware(
        cpu=_cpu_model(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        gpus=tuple(torch.cuda.get_device_name(i) for i in range(num_gpus)),
        load_1min=round(os.getloadavg()[0], 2),
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "d3d_sglang": d3d_sglang.__version__,
    }
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions
