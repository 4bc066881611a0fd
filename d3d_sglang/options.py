"""The serving options of D3D and where each one comes from.

One table lists them. A value is taken from the command line (`--d3d-mode`), else from the environment
(`SGLANG_D3D_MODE`), else from the drafter's `d3d_config` where it has such a value, else from the default.
The command line reaches the scheduler processes through the environment, so this module reads one source.
It imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

ENV_PREFIX = "SGLANG_D3D_"
FLAG_PREFIX = "--d3d-"
FROM_DRAFTER = "the drafter's d3d_config"


@dataclass(frozen=True)
class OptionSpec:
    """One option as users see it: name, default, allowed values (empty: see `check`), help.

    `check` raises ValueError with what is allowed. Without a default the value is the drafter's.
    """

    name: str
    help: str
    default: str | None = None
    choices: tuple[str, ...] = ()
    check: Callable[[str], None] | None = None

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return FLAG_PREFIX + self.name.replace("_", "-")


def _check_device(value: str) -> None:
    kind, _, index = value.partition(":")
    if value not in ("target", "cpu") and not (kind == "cuda" and index.isdigit()):
        raise ValueError("'target', 'cpu', 'cuda:N'")


def _check_count(value: str) -> None:
    if not (value.isascii() and value.isdigit() and int(value) >= 1):
        raise ValueError("whole numbers from 1")


OPTION_SPECS: tuple[OptionSpec, ...] = (
    OptionSpec(
        name="mode",
        # Until packed passes run beside the verification they only add time to a round.
        default="sync",
        choices=("sync", "async"),
        help="async: while the target verifies a block, the drafter drafts ahead for its possible outcomes; "
        "sync: it drafts when the outcome is known.",
    ),
    OptionSpec(
        name="coverage",
        check=_check_count,
        help="C: the first C-1 rejection positions and full acceptance are drafted ahead.",
    ),
    OptionSpec(name="fanout", check=_check_count, help="F: tokens drafted ahead for per rejection position."),
    OptionSpec(
        name="miss",
        default="redraft",
        choices=("redraft", "sibling"),
        help="What a row does whose outcome was not drafted ahead. redraft: wait for a new draft; sibling: "
        "verify the nearest tokens there are.",
    ),
    OptionSpec(
        name="draft_sampling",
        default="match",
        choices=("match", "greedy"),
        help="Drafts of sampled requests. match: drawn at the request's temperature; greedy: the most likely "
        "tokens.",
    ),
    OptionSpec(
        name="drafter_device",
        default="target",
        check=_check_device,
        help="Device of the drafter: 'target' (the device the target runs on), 'cpu' or 'cuda:N'.",
    ),
)


@dataclass(frozen=True)
class D3DOptions:
    """Effective options, with the source of each for the start-up line and `/d3d/state`."""

    mode: str
    coverage: int
    fanout: int
    miss: str
    draft_sampling: str
    drafter_device: str
    sources: Mapping[str, str]

    def describe(self) -> str:
        """One line: `mode=async (default) ...`."""
        return " ".join(
            f"{spec.name}={getattr(self, spec.name)} ({self.sources[spec.name]})" for spec in OPTION_SPECS
        )


def resolve_options(environ: Mapping[str, str], *, coverage: int, fanout: int) -> D3DOptions:
    """Read the options from an environment; `coverage` and `fanout` are the drafter's own.

    Raises:
        ValueError: an unknown `SGLANG_D3D_*` variable, or a value outside the allowed ones.
    """
    known = {spec.env: spec for spec in OPTION_SPECS}
    unknown = sorted(key for key in environ if key.startswith(ENV_PREFIX) and key not in known)
    if unknown:
        raise ValueError(f"unknown D3D option {unknown[0]}: known are {', '.join(sorted(known))}")
    fallback = {"coverage": str(coverage), "fanout": str(fanout)}
    values, sources = {}, {}
    for spec in OPTION_SPECS:
        values[spec.name] = _checked(spec, environ.get(spec.env, spec.default or fallback.get(spec.name, "")))
        sources[spec.name] = spec.env if spec.env in environ else "default" if spec.default else FROM_DRAFTER
    return D3DOptions(
        mode=values["mode"],
        coverage=int(values["coverage"]),
        fanout=int(values["fanout"]),
        miss=values["miss"],
        draft_sampling=values["draft_sampling"],
        drafter_device=values["drafter_device"],
        sources=sources,
    )


def _checked(spec: OptionSpec, value: str) -> str:
    if spec.choices and value not in spec.choices:
        raise ValueError(f"{spec.flag} ({spec.env}) is {value!r}: allowed are {', '.join(spec.choices)}")
    if spec.check is not None:
        try:
            spec.check(value)
        except ValueError as allowed:
            raise ValueError(f"{spec.flag} ({spec.env}) is {value!r}: allowed are {allowed}") from None
    return value
