"""Reading a drafter folder: a good one gives its facts, each bad one a message that says why."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, Qwen3MoeConfig

from d3d_sglang.drafter.checkpoint import CheckpointError, check_pair, read_drafter
from tests import tiny_folders as tiny

Damage = Callable[[Path], None]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Start-up budget of the server for both calls on a model with 49152 tokens, after libraries are imported.
MAX_SECONDS = 2.0


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "tiny-drafter"
    tiny.write_drafter(folder)
    return folder


@pytest.fixture
def drafter(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "drafter"))


@pytest.fixture
def target(pristine: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(pristine, tmp_path / "target"))
    tiny.edit_json(folder / "config.json", d3d_config=None)
    return folder


def change_config(**changes: Any) -> Damage:
    return lambda folder: tiny.edit_json(folder / "config.json", **changes)


def change_d3d(**changes: Any) -> Damage:
    return lambda folder: tiny.edit_d3d_config(folder, **changes)


def change_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return damage


def change_bytes(change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / WEIGHTS
        path.write_bytes(change(path.read_bytes()))

    return damage


def replace_config(config: Any, architecture: str) -> Damage:
    def damage(folder: Path) -> None:
        config.architectures = [architecture]
        config.save_pretrained(folder)

    return damage


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_text(text)

    return damage


def in_turn(*damages: Damage) -> Damage:
    def damage(folder: Path) -> None:
        for one in damages:
            one(folder)

    return damage


def shard(folder: Path) -> None:
    """Split the weights into two shards with an index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_a_good_folder_gives_its_facts(drafter: Path) -> None:
    read = read_drafter(str(drafter))
    assert read.path == drafter
    assert (read.vocab_size, read.max_position_embeddings, read.num_layers) == (tiny.NUM_ROWS, 128, 4)
    assert (read.d3d_config.block_size, read.d3d_config.mask_token_id) == (4, 6)
    assert read.dtype == torch.float32
    assert read.weight_files == (drafter / WEIGHTS,)
    assert not read.has_length_dependent_rotary


def test_shards_are_read(drafter: Path) -> None:
    shard(drafter)
    assert [path.name for path in read_drafter(drafter).weight_files] == [
        "part-0.safetensors",
        "part-1.safetensors",
    ]


@pytest.mark.parametrize(("rope_type", "expected"), [("dynamic", True), ("linear", False)])
def test_length_dependent_rotary_is_noted(drafter: Path, rope_type: str, expected: bool) -> None:
    rope = {"rope_type": rope_type, "factor": 2.0, "rope_theta": 10000.0}
    tiny.edit_json(drafter / "config.json", rope_parameters=rope)
    assert read_drafter(drafter).has_length_dependent_rotary is expected


def drop_head(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["lm_head.weight"]


def test_a_tied_head_may_be_left_out_if_the_config_says_so(drafter: Path) -> None:
    change_weights(drop_head)(drafter)
    tiny.edit_json(drafter / "config.json", tie_word_embeddings=True)
    assert read_drafter(drafter).num_layers == 4


NORM = "model.layers.1.input_layernorm.weight"
BERT = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
MOE = Qwen3MoeConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)

BAD_FOLDERS: dict[str, tuple[Damage, str]] = {
    "folder missing": (shutil.rmtree, "does not exist: give a local folder, made with `d3d init-drafter`"),
    "no config": (remove("config.json"), "has no config.json"),
    "config not JSON": (write("config.json", "{"), "config.json is not valid JSON"),
    "config not an object": (write("config.json", "[]"), "must hold a JSON object, it holds list"),
    "unknown model type": (
        change_config(model_type="flux9"),
        "flux9.*not a config that transformers can read",
    ),
    "no architecture": (change_config(architectures=[]), r"architectures is \[\]"),
    "not a causal LM": (replace_config(BERT, "BertForMaskedLM"), r"\['BertForMaskedLM'\].* ForCausalLM"),
    "mixture of experts": (
        replace_config(MOE, "Qwen3MoeForCausalLM"),
        "Qwen3MoeForCausalLM .*not supported.* llama",
    ),
    "foreign class": (change_config(architectures=["MyForCausalLM"]), "MyForCausalLM of model_type 'llama'"),
    "quantised": (change_config(quantization_config={"quant_method": "fp8"}), "quantization_config is set"),
    "no d3d_config": (change_config(d3d_config=None), "not a drafter.* d3d init-drafter --from"),
    "B < 2": (change_d3d(block_size=1), "block_size is 1: it must be an integer at least 2"),
    "unknown field": (change_d3d(block=4), "unknown field 'block'"),
    "source layers": (
        change_d3d(source_layers=[0, 1]),
        "source_layers lists 2 layers, num_hidden_layers is 4",
    ),
    "mask out of range": (
        change_d3d(mask_token_id=32),
        "mask_token_id 32 is out of range: allowed are 0 to 31",
    ),
    "mask is unk": (change_d3d(mask_token_id=tiny.UNK_ID), "mask_token_id 0 is the unk token"),
    "mask is bos": (change_d3d(mask_token_id=tiny.BOS_ID), "mask_token_id 1 is the bos token"),
    "mask is eos": (change_d3d(mask_token_id=tiny.EOS_ID), "mask_token_id 2 is the eos token"),
    "mask is pad": (change_d3d(mask_token_id=tiny.PAD_ID), "mask_token_id 3 is the pad token"),
    "mask in template": (
        change_d3d(mask_token_id=tiny.TURN_ID),
        r"mask_token_id 4 is '<\|turn\|>', which the chat",
    ),
    "mask is a word": (
        change_d3d(mask_token_id=tiny.WORD_ID),
        "mask_token_id 7 is the ordinary token 'word0'",
    ),
    "no tokenizer": (remove("tokenizer.json"), "has no tokenizer that can be read"),
    "broken tokenizer": (write("tokenizer.json", "{}"), "has no tokenizer that can be read"),
    "no weights": (remove(WEIGHTS), "holds no weights"),
    "truncated data": (change_bytes(lambda x: x[:-100]), f"{WEIGHTS} is truncated: the header declares"),
    "truncated header": (change_bytes(lambda x: x[:100]), r"\(100 bytes\) is truncated"),
    "empty file": (change_bytes(lambda x: b""), r"\(0 bytes\) is truncated"),
    "trailing bytes": (change_bytes(lambda x: x + b"0"), "longer than its header says"),
    "header not JSON": (change_bytes(lambda x: x[:8] + b"!" + x[9:]), "broken header"),
    "header at odds with itself": (
        change_bytes(lambda x: x.replace(b'"shape":[16]', b'"shape":[17]', 1)),
        r"broken header \(.* has shape \[17\] but 64 bytes\)",
    ),
    "LFS pointer": (
        change_bytes(lambda x: b"version https://git-lfs.github.com/spec/v1\n"),
        "Git LFS pointer",
    ),
    "tensor missing": (change_weights(lambda x: x.pop(NORM)), f"the weights lack {NORM}"),
    "empty tensor": (
        change_weights(lambda x: x.update({NORM: torch.zeros(0)})),
        r"shape \[0\].*\[16\].*ZeRO-3",
    ),
    "other shape": (
        change_weights(lambda x: x.update({NORM: torch.zeros(8)})),
        r"shape \[8\].*asks for \[16\]",
    ),
    "other dtype": (
        change_weights(lambda x: x.update({NORM: torch.zeros(16).long()})),
        "stored as I64, allowed are",
    ),
    "head missing": (change_weights(drop_head), "stores no lm_head.weight.* tie_word_embeddings"),
    "head missing, tie unsaid": (
        in_turn(change_weights(drop_head), change_config(tie_word_embeddings=None)),
        "stores no lm_head.weight.* does not say tie_word_embeddings: true",
    ),
    "shard missing": (
        in_turn(shard, remove("part-1.safetensors")),
        "2 weight files, 1 of them missing .*part-1",
    ),
    "index not JSON": (in_turn(shard, write(INDEX, "{")), "not a safetensors index"),
    "index leaves the folder": (
        in_turn(shard, write(INDEX, json.dumps({"weight_map": {"a": "../x.safetensors"}}))),
        "must map tensor names to file names",
    ),
    "index names a tensor no shard has": (
        in_turn(shard, write(INDEX, json.dumps({"weight_map": {"a": "part-0.safetensors"}}))),
        "part-0.safetensors lacks the tensor a",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BAD_FOLDERS.values(), ids=BAD_FOLDERS)
def test_a_bad_folder_is_refused_with_the_reason(drafter: Path, damage: Damage, message: str) -> None:
    damage(drafter)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_drafter(drafter)
    assert str(drafter) in str(caught.value), "the message names the folder"
    assert "\n" not in str(caught.value).strip(), "one paragraph"


def test_every_eos_of_the_generation_config_is_refused(drafter: Path) -> None:
    tiny.edit_json(drafter / "generation_config.json", eos_token_id=[tiny.EOS_ID, tiny.RESERVED_IDS[1]])
    with pytest.raises(CheckpointError, match="mask_token_id 6 is the eos token"):
        read_drafter(drafter)


def test_windowed_layers_are_refused(tmp_path: Path) -> None:
    layer_types = ["full_attention", "sliding_attention"]
    tiny.write_model(tmp_path, family="qwen3", num_hidden_layers=2, layer_types=layer_types)
    with pytest.raises(CheckpointError, match="layer_types holds sliding_attention"):
        read_drafter(tmp_path)


# Pairs


def test_a_fitting_pair_passes_without_warning(drafter: Path, target: Path) -> None:
    assert check_pair(read_drafter(drafter), target) == ()


def test_padding_rows_may_differ(drafter: Path, target: Path) -> None:
    for num_rows, warned in ((tiny.NUM_TOKENS, False), (tiny.NUM_ROWS + 8, True)):
        tiny.edit_json(target / "config.json", vocab_size=num_rows)
        warnings = check_pair(read_drafter(drafter), target)
        assert [("cannot read ids from 32" in warning) for warning in warnings] == [True] * warned


def test_fewer_rows_than_tokens_are_refused(drafter: Path, target: Path) -> None:
    tiny.edit_json(target / "config.json", vocab_size=tiny.NUM_TOKENS - 1)
    with pytest.raises(
        CheckpointError, match=r"27 ids, the drafter .* has 32 embedding rows and the target .* 26"
    ):
        check_pair(read_drafter(drafter), target)


def test_another_token_map_of_the_same_size_is_refused(drafter: Path, target: Path) -> None:
    words = list(tiny.TOKENS)
    words[10], words[20] = words[20], words[10]
    tiny.write_tokenizer(target, tokens=tuple(words))
    with pytest.raises(CheckpointError) as caught:
        check_pair(read_drafter(drafter), target)
    assert "id 10: 'word3' against 'word13'; id 20: 'word13' against 'word3')" in str(caught.value)


def test_another_vocabulary_size_is_refused_with_three_differences(drafter: Path, target: Path) -> None:
    tiny.write_tokenizer(target, tokens=tiny.TOKENS[:-5])
    with pytest.raises(CheckpointError, match=r"27 and 22 tokens; .*id 22: 'word15' against None") as caught:
        check_pair(read_drafter(drafter), target)
    assert str(caught.value).count("id 2") == 3


def test_the_targets_template_may_not_use_the_mask_token(drafter: Path, target: Path) -> None:
    (target / "chat_template.jinja").write_text("{{ messages[0].content }}" + tiny.RESERVED[1])
    with pytest.raises(CheckpointError, match=r"mask_token_id 6 is .*which the chat template uses.*target"):
        check_pair(read_drafter(drafter), target)


def test_a_tokenizer_given_apart_is_the_one_compared(drafter: Path, target: Path, tmp_path: Path) -> None:
    tiny.write_tokenizer(target, tokens=tiny.TOKENS[:-5])
    tiny.write_tokenizer(tmp_path / "tokenizer")
    assert check_pair(read_drafter(drafter), target, tokenizer_path=tmp_path / "tokenizer") == ()


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_target_that_cannot_be_read_is_named(drafter: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=f"the target .*{name} cannot be read"):
        check_pair(read_drafter(drafter), tmp_path / name)


@pytest.mark.parametrize(
    ("mode", "has_switch", "warning"),
    [
        (None, False, None),
        (None, True, "does not say which it was trained for"),
        ("on", True, None),
        ("off", True, "trained for thinking off: send chat_template_kwargs"),
        ("on", False, "trained for thinking on, the target's chat template has no such mode"),
    ],
)
def test_thinking_mode_mismatch_is_a_warning(
    drafter: Path, target: Path, mode: str | None, has_switch: bool, warning: str | None
) -> None:
    tiny.edit_d3d_config(drafter, thinking_mode=mode)
    if has_switch:
        (target / "chat_template.jinja").write_text("{% if enable_thinking %}x{% endif %}")
    warnings = check_pair(read_drafter(drafter), target)
    assert len(warnings) == (warning is not None)
    assert warning is None or warning in warnings[0]


@pytest.mark.parametrize(("made_for", "warned"), [("org/Target", False), ("org/Other", True), (None, False)])
def test_another_target_name_is_a_warning(
    drafter: Path, target: Path, made_for: str | None, warned: bool
) -> None:
    tiny.edit_d3d_config(drafter, target_model=made_for)
    warnings = check_pair(read_drafter(drafter), target)
    assert [("made for the target 'org/Other'" in warning) for warning in warnings] == [True] * warned


@pytest.mark.slow
def test_start_up_checks_of_a_real_model_are_fast(tmp_path: Path) -> None:
    from serve.smollm2 import MASK_TOKEN_ID, smollm2_folder

    target = smollm2_folder(dtype="bfloat16")
    drafter = Path(shutil.copytree(target, tmp_path / "drafter"))
    tiny.edit_json(drafter / "config.json", d3d_config={"block_size": 16, "mask_token_id": MASK_TOKEN_ID})
    start = time.perf_counter()
    assert check_pair(read_drafter(drafter), target) == ()
    assert time.perf_counter() - start < MAX_SECONDS
