"""The `d3d_config` object: what it accepts, what it refuses and how the refusal reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3d_sglang.drafter_config import DrafterConfig

MINIMAL = {"block_size": 16, "mask_token_id": 5}
LAYER_SETS = st.sets(st.integers(0, 99))
NAMES = st.text(min_size=1)


@st.composite
def configs(draw: st.DrawFn) -> DrafterConfig:
    block_size = draw(st.integers(2, 64))
    return DrafterConfig(
        block_size=block_size,
        mask_token_id=draw(st.integers(0, 200_000)),
        target_model=draw(st.none() | NAMES),
        source_layers=tuple(sorted(draw(LAYER_SETS))),
        pruned_layers=tuple(draw(LAYER_SETS)),
        thinking_mode=draw(st.sampled_from(["on", "off", None])),
        coverage=draw(st.integers(1, block_size)),
        fanout=draw(st.integers(1, 9)),
        provenance=draw(st.dictionaries(st.text(), st.text())),
    )


@given(configs())
def test_it_comes_back_from_json(config: DrafterConfig) -> None:
    stored = json.loads(json.dumps(config.to_dict()))
    assert DrafterConfig.from_dict(stored, where="config.json") == config


def test_defaults() -> None:
    config = DrafterConfig.from_dict(MINIMAL, where="config.json")
    assert (config.coverage, config.fanout) == (12, 2)
    assert (config.source_layers, config.pruned_layers, config.provenance) == ((), (), {})
    assert config.target_model is None and config.thinking_mode is None


@pytest.mark.parametrize(("block_size", "coverage"), [(2, 2), (11, 11), (12, 12), (13, 12), (64, 12)])
def test_default_coverage_fits_the_block(block_size: int, coverage: int) -> None:
    config = DrafterConfig.from_dict(MINIMAL | {"block_size": block_size}, where="config.json")
    assert config.coverage == coverage


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"block_size": 1}, "block_size is 1: it must be an integer at least 2"),
        ({"block_size": "16"}, "block_size is '16'"),
        ({"block_size": True}, "block_size is True"),
        ({"block_size": 16.0}, r"block_size is 16\.0"),
        ({"block_size": None}, "block_size is None"),
        ({"mask_token_id": -1}, "mask_token_id is -1: it must be an integer at least 0"),
        ({"target_model": ""}, "target_model is ''"),
        ({"target_model": 3}, "target_model is 3"),
        ({"source_layers": [3, 1]}, r"source_layers is \[3, 1\].*ascending"),
        ({"source_layers": [1, 1]}, r"source_layers is \[1, 1\].*different"),
        ({"source_layers": "0,1"}, "source_layers is '0,1'"),
        ({"pruned_layers": [-1]}, r"pruned_layers is \[-1\]"),
        ({"pruned_layers": [2, 2]}, r"pruned_layers is \[2, 2\]"),
        ({"thinking_mode": "auto"}, "thinking_mode is 'auto': it must be 'on', 'off' or null"),
        ({"thinking_mode": True}, "thinking_mode is True"),
        ({"async": {"coverage": 0}}, "async.coverage is 0: it must be an integer from 1 to 16"),
        ({"async": {"coverage": 17}}, "async.coverage is 17: it must be an integer from 1 to 16"),
        ({"async": {"fanout": 0}}, "async.fanout is 0"),
        ({"async": {"fan_out": 2}}, "async has the unknown field 'fan_out': known are coverage, fanout"),
        ({"async": 3}, "async is 3: it must be a JSON object"),
        ({"provenance": {"step": 3}}, "provenance is"),
        ({"blocksize": 16}, "has the unknown field 'blocksize': known are block_size"),
    ],
)
def test_a_bad_field_is_named_with_its_value(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=r"^some/config.json: d3d_config.*" + named):
        DrafterConfig.from_dict(MINIMAL | change, where="some/config.json")


@pytest.mark.parametrize("missing", sorted(MINIMAL))
def test_a_missing_field_is_named(missing: str) -> None:
    fields = {key: value for key, value in MINIMAL.items() if key != missing}
    with pytest.raises(ValueError, match=f"d3d_config lacks the field '{missing}'"):
        DrafterConfig.from_dict(fields, where="config.json")


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_it_must_be_an_object(value: Any) -> None:
    with pytest.raises(ValueError, match=r"d3d_config is .* it must be a JSON object"):
        DrafterConfig.from_dict(value, where="config.json")
