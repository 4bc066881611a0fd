"""What a run starts from: layers, mask token, vocabulary, random weights of a shape."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny_folders as tiny
from train.config import TrainConfig, load_config
from train.initial_drafter import load_drafter, plan_drafter

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    tiny.write_model(folder)
    return folder


def config_of(tmp_path: Path, model: Path, *overrides: str) -> TrainConfig:
    path = tmp_path / "config.yaml"
    settings = {
        "out": "x",
        "model": {"path": str(model), "target": str(model), "block_size": 8},
        "data": {"train": ["c"]},
        "validation": {"coverage": 5, "fanout": 3},
        "attention": "sdpa",
    }
    path.write_text(json.dumps(settings))
    return load_config(path, overrides=overrides)


def test_a_model_becomes_a_drafter(tmp_path: Path, model: Path) -> None:
    d3d_config = plan_drafter(config_of(tmp_path, model)).d3d_config
    assert d3d_config.block_size == 8
    assert d3d_config.mask_token_id in tiny.RESERVED_IDS
    assert d3d_config.target_model == "target"
    assert d3d_config.source_layers == (0, 1, 2, 3)
    assert (d3d_config.coverage, d3d_config.fanout) == (5, 3)


def test_a_drafter_keeps_what_it_is(tmp_path: Path, model: Path) -> None:
    """Its mask token, its thinking mode, and the numbers its layers had in the model it came from."""
    drafter = tmp_path / "drafter"
    tiny.write_drafter(drafter, source_layers=[2, 5, 7, 9], thinking_mode="off", pruned_layers=[3])
    config = config_of(tmp_path, model, f"model.path={drafter}", "model.layers=[1, 3]")
    d3d_config = plan_drafter(config).d3d_config
    assert d3d_config.source_layers == (5, 9)
    assert d3d_config.mask_token_id == tiny.RESERVED_IDS[1]
    assert (d3d_config.thinking_mode, d3d_config.pruned_layers) == ("off", (3,))


def test_the_named_layers_are_loaded(tmp_path: Path, model: Path) -> None:
    config = config_of(tmp_path, model, "model.layers=[0, 3]", "precision=fp32")
    loaded = load_drafter(plan_drafter(config), config)
    stored = load_file(model / "model.safetensors")
    assert loaded.lm.config.num_hidden_layers == 2
    kept = loaded.lm.state_dict()["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(kept, stored["model.layers.3.mlp.up_proj.weight"])
    assert loaded.training and all(weight.requires_grad for weight in loaded.parameters())


def test_random_weights_keep_the_network(tmp_path: Path, model: Path) -> None:
    config = config_of(tmp_path, model, "model.random_init=true")
    loaded = load_drafter(plan_drafter(config), config).lm.state_dict()
    again = load_drafter(plan_drafter(config), config).lm.state_dict()
    stored = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert loaded[name].shape == stored[name].shape and loaded[name].dtype == torch.bfloat16
    assert torch.equal(loaded[name], again[name])
    assert not torch.equal(loaded[name].float(), stored[name])


def test_a_shape_needs_no_model(tmp_path: Path, model: Path) -> None:
    config = config_of(tmp_path, model, "model.random_init=true", f"model.shape={json.dumps(SHAPE)}")
    loaded = load_drafter(plan_drafter(config), config).lm
    assert type(loaded).__name__ == "Qwen3ForCausalLM"
    assert (loaded.config.num_hidden_layers, loaded.config.vocab_size) == (3, 40)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.layers=[0, 4]"], "model.layers is [0, 4]: it must name layers"),
        ([f"model.mask_token_id={tiny.EOS_ID}"], "mask_token_id 2 is the eos token"),
        ([f"model.mask_token_id={tiny.WORD_ID}"], "is the ordinary token 'word0'"),
        (["model.path=absent"], "model.path 'absent' is not a model"),
        (["model.random_init=true", "model.shape={model_type: gpt17}"], "is not a model that transformers"),
        (
            ["model.random_init=true", f"model.shape={json.dumps(SHAPE | {'vocab_size': 20})}"],
            "the network has 20 embedding rows",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, model: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_drafter(config_of(tmp_path, model, *overrides))


def test_another_token_map_is_refused(tmp_path: Path, model: Path) -> None:
    target = tmp_path / "target"
    tiny.write_model(target)
    swapped = list(tiny.TOKENS)
    swapped[-1], swapped[-2] = swapped[-2], swapped[-1]
    tiny.write_tokenizer(target, tokens=tuple(swapped))
    with pytest.raises(ValueError, match=r"different vocabularies .*id 25: 'word18' against 'word19'"):
        plan_drafter(config_of(tmp_path, model, f"model.target={target}"))
