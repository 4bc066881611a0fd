"""Options: where each value comes from, and what is refused."""

from __future__ import annotations

import pytest

from d3d_sglang.options import OPTION_SPECS, D3DOptions, resolve_options


def test_the_options_are_these() -> None:
    """Adding an option is a change of the interface: it means editing this test."""
    assert [(spec.flag, spec.env, spec.default) for spec in OPTION_SPECS] == [
        ("--d3d-mode", "SGLANG_D3D_MODE", "sync"),
        ("--d3d-drafter-device", "SGLANG_D3D_DRAFTER_DEVICE", "target"),
    ]
    fields = set(D3DOptions.__dataclass_fields__) - {"sources"}
    assert fields == {spec.name for spec in OPTION_SPECS}


def test_an_empty_environment_gives_the_defaults() -> None:
    options = resolve_options({"PATH": "/bin", "SGLANG_USE_CPU_ENGINE": "1"})
    assert {spec.name: getattr(options, spec.name) for spec in OPTION_SPECS} == {
        spec.name: spec.default for spec in OPTION_SPECS
    }
    assert set(options.sources.values()) == {"default"}


def test_the_environment_overrides_defaults_and_says_so() -> None:
    options = resolve_options({"SGLANG_D3D_DRAFTER_DEVICE": "cuda:1"})
    assert options.drafter_device == "cuda:1"
    assert options.sources == {"mode": "default", "drafter_device": "SGLANG_D3D_DRAFTER_DEVICE"}
    assert options.describe() == "mode=sync (default) drafter_device=cuda:1 (SGLANG_D3D_DRAFTER_DEVICE)"


@pytest.mark.parametrize("device", ["target", "cpu", "cuda:0", "cuda:12"])
def test_devices_that_are_allowed(device: str) -> None:
    assert resolve_options({"SGLANG_D3D_DRAFTER_DEVICE": device}).drafter_device == device


@pytest.mark.parametrize("device", ["cuda", "cuda:", "cuda:x", "cuda:-1", "gpu", "cpu:0", "target:0", ""])
def test_a_device_outside_the_allowed_ones_is_refused(device: str) -> None:
    with pytest.raises(ValueError) as error:
        resolve_options({"SGLANG_D3D_DRAFTER_DEVICE": device})
    for part in ("--d3d-drafter-device", "SGLANG_D3D_DRAFTER_DEVICE", repr(device), "'target'", "'cuda:N'"):
        assert part in str(error.value)


@pytest.mark.parametrize("mode", ["plain", "Sync", "async", ""])
def test_a_mode_outside_the_allowed_ones_is_refused(mode: str) -> None:
    with pytest.raises(ValueError) as error:
        resolve_options({"SGLANG_D3D_MODE": mode})
    for part in ("--d3d-mode", "SGLANG_D3D_MODE", repr(mode), "sync"):
        assert part in str(error.value)


def test_an_unknown_variable_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"SGLANG_D3D_MODUS.*SGLANG_D3D_MODE"):
        resolve_options({"SGLANG_D3D_MODUS": "sync"})
