"""The serving options of D3D and where each one comes from.

One table lists them. A value is taken from the command line (`--d3d-mode`), else from the environment
(`SGLANG_D3D_MODE`), else from the default. The command line reaches the scheduler processes through the
environment, so this module reads one source. It imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ENV_PREFIX = "SGLANG_D3D_"
FLAG_PREFIX = "--d3d-"


@dataclass(frozen=True)
class OptionSpec:
    """One option as users see it: name, default, allowed values (empty: free text), help."""

    name: str
    default: str
    help: str
    choices: tuple[str, ...] = ()

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return FLAG_PREFIX + self.name.replace("_", "-")


OPTION_SPECS: tuple[OptionSpec, ...] = (
    OptionSpec(
        name="mode",
        default="sync",
        choices=("sync",),
        help="sync: the drafter drafts a block, then the target verifies it.",
    ),
    OptionSpec(
        name="drafter_device",
        default="target",
        help="Device of the drafter: 'target' (the device the target runs on), 'cpu' or 'cuda:N'.",
    ),
)


@dataclass(frozen=True)
class D3DOptions:
    """Effective options, with the source of each for the start-up line and `/d3d/state`."""

    mode: str
    drafter_device: str
    sources: Mapping[str, str]

    def describe(self) -> str:
        """One line: `mode=sync (default) ...`."""
        return " ".join(
            f"{spec.name}={getattr(self, spec.name)} ({self.sources[spec.name]})" for spec in OPTION_SPECS
        )


def resolve_options(environ: Mapping[str, str]) -> D3DOptions:
    """Read the options from an environment.

    Raises:
        ValueError: an unknown `SGLANG_D3D_*` variable, or a value outside the allowed ones.
    """
    known = {spec.env: spec for spec in OPTION_SPECS}
    unknown = sorted(key for key in environ if key.startswith(ENV_PREFIX) and key not in known)
    if unknown:
        raise ValueError(f"unknown D3D option {unknown[0]}: known are {', '.join(sorted(known))}")
    values = {spec.name: _checked(spec, environ.get(spec.env)) for spec in OPTION_SPECS}
    sources = {spec.name: "default" if spec.env not in environ else spec.env for spec in OPTION_SPECS}
    return D3DOptions(**values, sources=sources)


def _checked(spec: OptionSpec, value: str | None) -> str:
    if value is None:
        return spec.default
    if spec.choices and value not in spec.choices:
        raise ValueError(f"{spec.flag} ({spec.env}) is {value!r}: allowed are {', '.join(spec.choices)}")
    if spec.name == "drafter_device":
        _check_device(spec, value)
    return value


def _check_device(spec: OptionSpec, value: str) -> None:
    kind, _, index = value.partition(":")
    if value in ("target", "cpu") or (kind == "cuda" and index.isdigit()):
        return
    raise ValueError(f"{spec.flag} ({spec.env}) is {value!r}: allowed are 'target', 'cpu', 'cuda:N'")
