"""Options: where each value comes from, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from d3d_sglang.options import FROM_DRAFTER, OPTION_SPECS, D3DOptions, resolve_options

COVERAGE, FANOUT = 7, 3  # the drafter's
VALUES: dict[str, Any] = {
    "mode": "sync",
    "coverage": COVERAGE,
    "fanout": FANOUT,
    "miss": "redraft",
    "draft_sampling": "match",
    "drafter_device": "target",
}


def resolve(**environ: str) -> D3DOptions:
    return resolve_options(environ, coverage=COVERAGE, fanout=FANOUT)


def refusal_of(**environ: str) -> str:
    with pytest.raises(ValueError) as error:
        resolve(**environ)
    return str(error.value)


def test_the_options_are_these() -> None:
    """Adding an option is a change of the interface: it means editing this test."""
    assert [(spec.flag, spec.env, spec.default) for spec in OPTION_SPECS] == [
        ("--d3d-mode", "SGLANG_D3D_MODE", "sync"),
        ("--d3d-coverage", "SGLANG_D3D_COVERAGE", None),
        ("--d3d-fanout", "SGLANG_D3D_FANOUT", None),
        ("--d3d-miss", "SGLANG_D3D_MISS", "redraft"),
        ("--d3d-draft-sampling", "SGLANG_D3D_DRAFT_SAMPLING", "match"),
        ("--d3d-drafter-device", "SGLANG_D3D_DRAFTER_DEVICE", "target"),
    ]
    fields = set(D3DOptions.__dataclass_fields__) - {"sources"}
    assert fields == {spec.name for spec in OPTION_SPECS}


def test_an_empty_environment_gives_the_defaults_and_the_drafters_values() -> None:
    options = resolve(PATH="/bin", SGLANG_USE_CPU_ENGINE="1")
    assert {spec.name: getattr(options, spec.name) for spec in OPTION_SPECS} == VALUES
    from_drafter = {name for name, source in options.sources.items() if source == FROM_DRAFTER}
    assert from_drafter == {"coverage", "fanout"}
    assert {options.sources[name] for name in set(VALUES) - from_drafter} == {"default"}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("mode", "sync", "sync"),
        ("mode", "async", "async"),
        ("coverage", "12", 12),
        ("fanout", "1", 1),
        ("miss", "sibling", "sibling"),
        ("draft_sampling", "greedy", "greedy"),
        ("drafter_device", "cuda:1", "cuda:1"),
    ],
)
def test_the_environment_overrides_one_value_and_says_so(name: str, text: str, value: object) -> None:
    env = f"SGLANG_D3D_{name.upper()}"
    options = resolve(**{env: text})
    assert {spec.name: getattr(options, spec.name) for spec in OPTION_SPECS} == VALUES | {name: value}
    assert [spec for spec, source in options.sources.items() if source == env] == [name]


def test_the_start_up_line_names_every_value_and_its_source() -> None:
    line = resolve(SGLANG_D3D_COVERAGE="4", SGLANG_D3D_MODE="sync").describe()
    assert line == (
        "mode=sync (SGLANG_D3D_MODE) coverage=4 (SGLANG_D3D_COVERAGE) fanout=3 (the drafter's d3d_config) "
        "miss=redraft (default) draft_sampling=match (default) drafter_device=target (default)"
    )


@pytest.mark.parametrize("device", ["target", "cpu", "cuda:0", "cuda:12"])
def test_devices_that_are_allowed(device: str) -> None:
    assert resolve(SGLANG_D3D_DRAFTER_DEVICE=device).drafter_device == device


@pytest.mark.parametrize("device", ["cuda", "cuda:", "cuda:x", "cuda:-1", "gpu", "cpu:0", "target:0", ""])
def test_a_device_outside_the_allowed_ones_is_refused(device: str) -> None:
    message = refusal_of(SGLANG_D3D_DRAFTER_DEVICE=device)
    for part in ("--d3d-drafter-device", "SGLANG_D3D_DRAFTER_DEVICE", repr(device), "'target'", "'cuda:N'"):
        assert part in message


@pytest.mark.parametrize("name", ["mode", "miss", "draft_sampling"])
@pytest.mark.parametrize("value", ["plain", "Sync", "Sibling", ""])
def test_a_word_outside_the_allowed_ones_is_refused(name: str, value: str) -> None:
    spec = next(spec for spec in OPTION_SPECS if spec.name == name)
    message = refusal_of(**{spec.env: value})
    for part in (spec.flag, spec.env, repr(value), *spec.choices):
        assert part in message


@pytest.mark.parametrize("name", ["coverage", "fanout"])
@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", " 3", ""])
def test_a_count_that_is_none_is_refused(name: str, value: str) -> None:
    message = refusal_of(**{f"SGLANG_D3D_{name.upper()}": value})
    for part in (f"--d3d-{name}", f"SGLANG_D3D_{name.upper()}", repr(value), "whole numbers from 1"):
        assert part in message


def test_an_unknown_variable_is_refused_by_name() -> None:
    message = refusal_of(SGLANG_D3D_MODUS="sync")
    assert "SGLANG_D3D_MODUS" in message and "SGLANG_D3D_MODE" in message
