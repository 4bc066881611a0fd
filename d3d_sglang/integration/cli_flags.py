"""The `--d3d-*` flags of SGLang's own command line, and the `/d3d/*` routes of its HTTP server.

SGLang's argument record is closed, so flags are added to its parser and their values handed to the scheduler
processes through the environment, which they inherit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from d3d_sglang.options import FROM_DRAFTER, OPTION_SPECS

_ARGS = "sglang.srt.server_args.ServerArgs"
_ALIAS = "sglang.srt.arg_groups.speculative_hook._resolve_speculative_algorithm_alias"


def install() -> None:
    """Hook SGLang's parser; takes effect when SGLang applies the hooks of all plugins."""
    HookRegistry.register(f"{_ARGS}.add_cli_args", _add_flags, HookType.AFTER)
    HookRegistry.register(f"{_ARGS}.from_cli_args", _take_flags, HookType.AROUND)
    HookRegistry.register(_ALIAS, _keep_name, HookType.AROUND)


def _keep_name(original: Callable[..., Any], algorithm: str | None, *args: Any, **kwargs: Any) -> Any:
    """SGLang looks for aliases inside the drafter folder, and fails on a missing one before we can say so."""
    return algorithm if (algorithm or "").upper() == "D3D" else original(algorithm, *args, **kwargs)


def _add_flags(_result: Any, parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("D3D", "used with --speculative-algorithm D3D")
    for spec in OPTION_SPECS:
        text = f"{spec.help} Default: {spec.default or FROM_DRAFTER}; environment: {spec.env}."
        group.add_argument(spec.flag, default=None, choices=spec.choices or None, help=text)


def _take_flags(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    values = {spec: getattr(args, "d3d_" + spec.name, None) for spec in OPTION_SPECS}
    given = {spec: value for spec, value in values.items() if value is not None}
    is_d3d = (args.speculative_algorithm or "").upper() == "D3D"
    if given and not is_d3d:
        flags = ", ".join(spec.flag for spec in given)
        raise SystemExit(f"error: {flags}: only with --speculative-algorithm D3D")
    for spec, value in given.items():
        os.environ[spec.env] = value
    if is_d3d:
        # Only the process that will serve HTTP parses a command line.
        from d3d_sglang.integration import state_route

        state_route.install()
    return original(cls, args)
