"""Making a drafter: the right layers, an honest config, all or nothing on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from d3d_sglang.drafter import initialise
from d3d_sglang.drafter.checkpoint import DrafterCheckpoint
from d3d_sglang.drafter.export import tensors_sha256
from d3d_sglang.drafter.initialise import DrafterPlan, init_drafter, keep_layers
from tests import tiny_folders as tiny

PROMPT = torch.tensor([[tiny.BOS_ID, 8, 9, 10, 11]])
LAYERS = (1, 3)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("private-place") / "tiny-source"
    tiny.write_model(folder)
    return folder


def make(model: Path, out: Path, **changes: Any) -> DrafterCheckpoint:
    fields = {"source": str(model), "out": out, "block_size": tiny.BLOCK_SIZE, "fanout": 2}
    return init_drafter(DrafterPlan(**fields | changes), progress=lambda line: None)


def test_kept_layers_are_those_of_the_source(source: Path, tmp_path: Path) -> None:
    make(source, tmp_path / "out", layers=LAYERS)
    ours, theirs = load_file(tmp_path / "out/model.safetensors"), load_file(source / "model.safetensors")
    expected = {name: tensor for name, tensor in theirs.items() if ".layers." not in name}
    for new, old in enumerate(LAYERS):
        prefix = f"model.layers.{old}."
        expected |= {
            name.replace(prefix, f"model.layers.{new}."): tensor
            for name, tensor in theirs.items()
            if name.startswith(prefix)
        }
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())


def test_it_loads_and_generates_as_a_plain_language_model(source: Path, tmp_path: Path) -> None:
    make(source, tmp_path / "out", layers=LAYERS)
    drafter = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(drafter.model.layers) == 2
    assert drafter.generate(PROMPT, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (1, 8)
    # The same network in memory: the source with the other layers made to do nothing.
    reference = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        for i in set(range(4)) - set(LAYERS):
            reference.model.layers[i].self_attn.o_proj.weight.zero_()
            reference.model.layers[i].mlp.down_proj.weight.zero_()
        torch.testing.assert_close(drafter(PROMPT).logits, reference(PROMPT).logits)


def test_all_layers_by_default_give_the_source_itself(source: Path, tmp_path: Path) -> None:
    drafter = make(source, tmp_path / "out")
    assert drafter.d3d_config.source_layers == (0, 1, 2, 3)
    assert tensors_sha256(load_file(drafter.weight_files[0])) == tensors_sha256(
        load_file(source / "model.safetensors")
    )


def test_the_config_says_how_it_was_made(source: Path, tmp_path: Path) -> None:
    drafter = make(source, tmp_path / "out", layers=LAYERS, thinking_mode="off", target=str(source))
    config = drafter.d3d_config
    assert (config.block_size, config.mask_token_id) == (tiny.BLOCK_SIZE, tiny.RESERVED_IDS[1])
    assert (config.coverage, config.fanout) == (tiny.BLOCK_SIZE, 2)
    assert (config.source_layers, config.thinking_mode) == (LAYERS, "off")
    assert config.target_model == config.provenance["source"] == "tiny-source"
    assert config.provenance["weights_sha256"] == tensors_sha256(load_file(drafter.weight_files[0]))
    assert {"d3d_sglang", "transformers"} < config.provenance.keys()


def test_no_file_tells_where_the_source_lies(source: Path, tmp_path: Path) -> None:
    make(source, tmp_path / "out", target=str(source))
    for path in (tmp_path / "out").iterdir():
        assert str(source.parent).encode() not in path.read_bytes(), path.name
        assert str(tmp_path).encode() not in path.read_bytes(), path.name


def test_tokenizer_and_template_come_along(source: Path, tmp_path: Path) -> None:
    make(source, tmp_path / "out")
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "out", source))
    messages = [{"role": "user", "content": "word1 word2"}]
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)


@pytest.mark.parametrize("tied", [True, False])
def test_the_tie_of_the_head_is_explicit(tmp_path: Path, tied: bool) -> None:
    tiny.write_model(tmp_path / "source", tied=tied)
    drafter = make(tmp_path / "source", tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in load_file(drafter.weight_files[0])) is not tied


def test_lists_with_an_entry_a_layer_are_cut_too(tmp_path: Path) -> None:
    tiny.write_model(tmp_path / "source", family="qwen3")
    make(tmp_path / "source", tmp_path / "out", layers=LAYERS)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["num_hidden_layers"], config["layer_types"]) == (2, ["full_attention"] * 2)


def test_a_model_cut_in_memory_works_like_one_read_back(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    tiny.write_model(
        tmp_path / "source", family="qwen3", layer_types=types, sliding_window=3, use_sliding_window=True
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    keep_layers(model, (0, 3))
    assert model.config.layer_types == ["full_attention", "sliding_attention"]
    model.save_pretrained(tmp_path / "cut")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(PROMPT, **settings), back.generate(PROMPT, **settings))


def test_dtype_is_the_sources_unless_asked_for(source: Path, tmp_path: Path) -> None:
    assert make(source, tmp_path / "kept").dtype == torch.float32
    assert make(source, tmp_path / "asked", dtype=torch.bfloat16).dtype == torch.bfloat16


def test_others_may_read_the_weights(source: Path, tmp_path: Path) -> None:
    drafter = make(source, tmp_path / "out")
    (tmp_path / "plain").write_text("")
    assert drafter.weight_files[0].stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_mask_token_without_a_reserved_one_is_a_padding_row(source: Path, tmp_path: Path) -> None:
    tiny.write_model(tmp_path / "source")
    tokens = tuple(token.replace("<|reserved", "<|other") for token in tiny.TOKENS)
    tiny.write_tokenizer(tmp_path / "source", tokens=tokens)
    assert make(tmp_path / "source", tmp_path / "out").d3d_config.mask_token_id == tiny.NUM_TOKENS


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "block size": ({"block_size": 1}, "block_size is 1"),
    "coverage": ({"coverage": 5}, "coverage is 5: it must be an integer from 1 to 4"),
    "fanout": ({"fanout": 0}, "fanout is 0"),
    "layer out of range": ({"layers": (0, 4)}, "--layers is 0,4: .* from 0 to 3"),
    "no layer": ({"layers": ()}, "--layers is "),
    "layer twice": ({"layers": (1, 1)}, r"source_layers is \[1, 1\]"),
    "layers unordered": ({"layers": (3, 1)}, "ascending"),
    "mask out of range": ({"mask_token_id": 32}, "mask_token_id 32 is out of range"),
    "mask is eos": ({"mask_token_id": tiny.EOS_ID}, "mask_token_id 2 is the eos token"),
    "mask in template": ({"mask_token_id": tiny.TURN_ID}, "which the chat template uses"),
    "mask is a word": ({"mask_token_id": tiny.WORD_ID}, "is the ordinary token 'word0'"),
    "no source": ({"source": "/nowhere/at-all"}, "--from /nowhere/at-all: give a model folder"),
    "no target": ({"target": "/nowhere/at-all"}, "/nowhere/at-all"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_names_the_setting_and_leaves_nothing(
    source: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(source, tmp_path / "out", **changes)
    assert list(tmp_path.iterdir()) == []


def test_a_target_with_another_vocabulary_is_refused(source: Path, tmp_path: Path) -> None:
    tiny.write_model(tmp_path / "target")
    tiny.write_tokenizer(tmp_path / "target", tokens=(*tiny.TOKENS[:-2], "x", "y"))
    with pytest.raises(ValueError, match=r"different vocabularies .*id 25: 'word18' against 'x'"):
        make(source, tmp_path / "out", target=str(tmp_path / "target"))
    assert not (tmp_path / "out").exists()


def test_a_target_with_too_few_rows_is_refused(source: Path, tmp_path: Path) -> None:
    tiny.write_model(tmp_path / "target", vocab_size=tiny.NUM_TOKENS - 1)
    with pytest.raises(ValueError, match="both need a row for every id"):
        make(source, tmp_path / "out", target=str(tmp_path / "target"))
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_source_with_missing_weights_is_refused(tmp_path: Path) -> None:
    tiny.write_model(tmp_path / "source")
    weights = tmp_path / "source/model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"incomplete: 1 tensors.*layers\.2\.mlp\.up_proj"):
        make(tmp_path / "source", tmp_path / "out")


def test_a_source_with_truncated_weights_is_refused(tmp_path: Path) -> None:
    tiny.write_model(tmp_path / "source")
    weights = tmp_path / "source/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"the weights of .* cannot be loaded"):
        make(tmp_path / "source", tmp_path / "out")


# The destination


def test_a_folder_in_use_is_kept_unless_overwritten(source: Path, tmp_path: Path) -> None:
    make(source, tmp_path / "out", layers=(0,))
    with pytest.raises(ValueError, match=r"--out .*out is not empty.* --overwrite"):
        make(source, tmp_path / "out", layers=LAYERS)
    (tmp_path / "out/stale").write_text("")
    assert make(source, tmp_path / "out", layers=LAYERS, overwrite=True).num_layers == 2
    assert not (tmp_path / "out/stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_is_used(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert make(source, tmp_path / "out").num_layers == 4


def test_parents_are_made(source: Path, tmp_path: Path) -> None:
    assert make(source, tmp_path / "a/b/out").path == tmp_path / "a/b/out"


def test_overwrite_spares_what_is_not_a_model(source: Path, tmp_path: Path) -> None:
    (tmp_path / "letters").write_text("dear")
    with pytest.raises(ValueError, match="holds something else than a model"):
        make(source, tmp_path, overwrite=True)
    with pytest.raises(ValueError, match="is a file"):
        make(source, tmp_path / "letters", overwrite=True)
    assert (tmp_path / "letters").read_text() == "dear"


@pytest.mark.parametrize("role", ["source", "target"])
@pytest.mark.parametrize("inside", [".", "sub"])
def test_overwrite_spares_source_and_target(source: Path, tmp_path: Path, role: str, inside: str) -> None:
    tiny.write_model(tmp_path / "out")
    tiny.write_model(tmp_path / "out/sub")
    changes = {role: str(tmp_path / "out" / inside)}
    with pytest.raises(ValueError, match="--overwrite would delete it"):
        make(source, tmp_path / "out", overwrite=True, **changes)
    assert (tmp_path / "out/sub/config.json").is_file()


@pytest.mark.parametrize("step", ["write_files", "check_written", "read_drafter", "put_in_place"])
def test_a_failure_half_way_leaves_the_old_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    make(source, tmp_path / "out", layers=(0,))
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(initialise, step, fail)
    with pytest.raises(KeyboardInterrupt):
        make(source, tmp_path / "out", layers=LAYERS, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_weights_that_come_back_different_are_not_put_in_place(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = initialise.write_files

    def write_and_flip_a_bit(folder: Path, *args: Any, **kwargs: Any) -> str:
        sha256 = write(folder, *args, **kwargs)
        weights = bytearray((folder / "model.safetensors").read_bytes())
        weights[-3] ^= 1
        (folder / "model.safetensors").write_bytes(weights)
        return sha256

    monkeypatch.setattr(initialise, "write_files", write_and_flip_a_bit)
    with pytest.raises(ValueError, match=r"read back .* are not those written"):
        make(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_digest_sees_name_shape_dtype_and_value() -> None:
    base = torch.arange(6.0)
    variants = [
        {"a": base},
        {"b": base},
        {"a": base.reshape(2, 3)},
        {"a": base.view(torch.int32)},
        {"a": base + 1},
        {"a": base, "b": base},
    ]
    assert len({tensors_sha256(variant) for variant in variants}) == len(variants)
    assert tensors_sha256({"b": base, "a": base}) == tensors_sha256({"a": base.clone(), "b": base.clone()})
