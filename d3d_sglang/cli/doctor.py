"""`d3d doctor`: says whether this machine can serve D3D, one line a check, and what to do where it cannot.

Its main use: SGLang only logs a plugin that fails to import and later calls the algorithm unknown; here the
plugin is loaded the same way and the traceback is shown. Imports what it checks inside the checks, since any
of it may be broken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import textwrap
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

from d3d_sglang.drafter_config import DEFAULT_COVERAGE, DEFAULT_FANOUT
from d3d_sglang.options import resolve_options

Status = Literal["ok", "warn", "FAIL"]

DISTRIBUTION = "d3d-sglang"
PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_NAME = "d3d"
ALGORITHM = "D3D"
SGLANG_VERSION = "0.5.23"
REINSTALL = "install the project again in this environment (`pip install -e .`)"


@dataclass(frozen=True)
class Check:
    """The result of one check; `detail` is text of several lines, such as a traceback."""

    name: str
    status: Status
    message: str
    detail: str = ""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="check plugin, versions, devices and a drafter",
        description="Check that this environment can serve D3D. Exit code 1 if a check fails.",
    )
    parser.add_argument("--drafter", metavar="DIR", help="also check this drafter folder")
    parser.add_argument("--target", metavar="MODEL", help="also check that the drafter fits this target")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the checks and print them; returns the exit code."""
    if args.target is not None and args.drafter is None:
        raise ValueError("--target is given without --drafter: a target is checked together with a drafter")
    checks = []
    out = sys.stdout
    # Libraries print while they are imported; the JSON must stay alone on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        for check in examine(drafter=args.drafter, target=args.target, environ=os.environ):
            checks.append(check)
            if not args.json:
                print(render(check), file=out, flush=True)
    failed = any(check.status == "FAIL" for check in checks)
    if args.json:
        print(json.dumps({"ok": not failed, "checks": [asdict(check) for check in checks]}, indent=2))
    return 1 if failed else 0


def examine(*, drafter: str | None, target: str | None, environ: Mapping[str, str]) -> Iterator[Check]:
    """All checks, one by one, in the order a reader needs them."""
    yield from check_versions()
    yield from check_devices(environ)
    yield check_plugin(environ)
    yield check_options(environ)
    if drafter is not None:
        yield from check_drafter(drafter, target)


def render(check: Check) -> str:
    """One line, and the detail indented below it."""
    line = f"{check.status:<4}  {check.name}: {check.message}"
    return line if not check.detail else line + "\n" + textwrap.indent(check.detail.rstrip(), " " * 6)


def check_versions() -> Iterator[Check]:
    """The project itself, SGLang (one exact version), and the libraries against the project's pins."""
    own = _version(DISTRIBUTION)
    if own is None:
        yield Check(DISTRIBUTION, "FAIL", f"not installed, so SGLang cannot find the plugin: {REINSTALL}")
    else:
        yield Check(DISTRIBUTION, "ok", own)
    yield _compare("sglang", SGLANG_VERSION, on_difference="FAIL")
    pins = _pins()
    for name in ("torch", "transformers"):
        yield _compare(name, pins.get(name), on_difference="warn")
    flashinfer = _version("flashinfer-python")
    if flashinfer is None:
        yield Check("flashinfer", "warn", "not installed: a GPU server needs it, the CPU engine does not")
    else:
        yield Check("flashinfer", "ok", flashinfer)


def check_devices(environ: Mapping[str, str]) -> Iterator[Check]:
    """CUDA devices with their memory, or the CPU engine."""
    try:
        import torch
    except Exception:  # any failure of a library's import is the finding
        yield Check("devices", "FAIL", "torch cannot be imported", detail=traceback.format_exc())
        return
    if not torch.cuda.is_available():
        yield _cpu_engine(environ)
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        yield Check(f"cuda:{index}", "ok", f"{torch.cuda.get_device_name(index)}, {memory}")


def check_plugin(environ: Mapping[str, str]) -> Check:
    """Load and run the entry point as SGLang does, but let its exception be seen."""
    found = [point for point in metadata.entry_points(group=PLUGIN_GROUP) if point.name == PLUGIN_NAME]
    if not found:
        return Check(
            "plugin",
            "FAIL",
            f"no entry point {PLUGIN_NAME!r} in group {PLUGIN_GROUP!r} is visible: {REINSTALL}",
        )
    allowed = [name.strip() for name in environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if allowed and PLUGIN_NAME not in allowed:
        setting = f"SGLANG_PLUGINS={','.join(allowed)}"
        return Check("plugin", "FAIL", f"{setting} leaves out {PLUGIN_NAME!r}: add it, or unset the variable")
    try:
        # When several distributions use the name, SGLang keeps the last.
        found[-1].load()()
        hook_errors = _apply_hooks()
        registered = _is_registered()
    except Exception:
        message = f"{found[-1].value} failed; SGLang would only log this and then not know the algorithm:"
        return Check("plugin", "FAIL", message, detail=traceback.format_exc())
    if hook_errors:
        message = f"{found[-1].value} ran, but SGLang could not apply its hooks and would only log this:"
        return Check("plugin", "FAIL", message, detail="\n".join(hook_errors))
    if not registered:
        return Check(
            "plugin", "FAIL", f"{found[-1].value} ran, but SGLang does not know {ALGORITHM}: {REINSTALL}"
        )
    return Check("plugin", "ok", f"{found[-1].value}, SGLang knows --speculative-algorithm {ALGORITHM}")


def check_options(environ: Mapping[str, str]) -> Check:
    """The `SGLANG_D3D_*` variables of this environment."""
    try:
        options = resolve_options(environ, coverage=DEFAULT_COVERAGE, fanout=DEFAULT_FANOUT)
    except ValueError as error:
        return Check("options", "FAIL", str(error))
    return Check("options", "ok", options.describe())


def check_drafter(drafter_path: str, target_path: str | None) -> Iterator[Check]:
    """A drafter folder, and whether it fits a target."""
    try:
        from d3d_sglang.drafter.checkpoint import check_pair, read_drafter
    except Exception:  # any failure of a library's import is the finding
        yield Check(
            "drafter", "FAIL", "the code that reads it fails to import", detail=traceback.format_exc()
        )
        return
    try:
        drafter = read_drafter(drafter_path)
    except ValueError as error:
        yield Check("drafter", "FAIL", str(error))
        return
    config = drafter.d3d_config
    summary = (
        f"{drafter.num_layers} layers, block size {config.block_size}, mask token {config.mask_token_id}"
    )
    yield Check("drafter", "ok", f"{drafter.path}: {summary}, {drafter.dtype}")
    if drafter.has_length_dependent_rotary:
        yield Check("drafter", "warn", "its rotary embedding depends on the length: no CUDA graphs for it")
    if target_path is None:
        return
    try:
        warnings = check_pair(drafter, target_path)
    except ValueError as error:
        yield Check("target", "FAIL", str(error))
        return
    yield Check("target", "ok", f"{target_path} has the drafter's vocabulary")
    yield from (Check("target", "warn", warning) for warning in warnings)


def _cpu_engine(environ: Mapping[str, str]) -> Check:
    if environ.get("SGLANG_USE_CPU_ENGINE", "").lower() in ("1", "true"):
        return Check("devices", "ok", "no GPU: CPU engine (SGLANG_USE_CPU_ENGINE is set)")
    return Check("devices", "warn", "no GPU: to serve on the CPU engine, set SGLANG_USE_CPU_ENGINE=1")


def _apply_hooks() -> list[str]:
    """Patch SGLang as it does after loading plugins; returns what it logs where a patch fails."""
    from sglang.srt.plugins import hook_registry

    errors = _ErrorKeeper(level=logging.ERROR)
    hook_registry.logger.addHandler(errors)
    try:
        hook_registry.HookRegistry.apply_hooks()
    finally:
        hook_registry.logger.removeHandler(errors)
    return errors.texts


class _ErrorKeeper(logging.Handler):
    """Keeps log records as text, tracebacks included."""

    def __init__(self, *, level: int) -> None:
        super().__init__(level)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


def _is_registered() -> bool:
    from sglang.srt.speculative.spec_registry import get_spec

    return get_spec(ALGORITHM) is not None


def _compare(name: str, wanted: str | None, *, on_difference: Status) -> Check:
    installed = _version(name)
    if installed is None:
        return Check(name, "FAIL", f"not installed: {REINSTALL}")
    # A local build tag such as +cu130 names the same release.
    if wanted is not None and installed.split("+")[0] != wanted:
        return Check(name, on_difference, f"{installed} is installed, D3D is made for {wanted}: {REINSTALL}")
    return Check(name, "ok", installed)


def _pins() -> dict[str, str]:
    """name -> version of the exact requirements of the installed project."""
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    pairs = (requirement.split(";")[0].strip().partition("==") for requirement in requirements)
    return {name.strip(): version.strip() for name, equals, version in pairs if equals}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
