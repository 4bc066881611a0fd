"""Start-up checks: good arguments pass, every refused one is named with its value and the reason."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import transformers

from d3d_sglang import cpu_engine
from d3d_sglang.integration import server_args
from d3d_sglang.integration.server_args import REFUSALS, settle, validate
from tests import tiny_folders as tiny

# A refused value of every field. A new refusal needs an entry here.
REFUSED: dict[str, object] = {
    "speculative_eagle_topk": 4,
    "speculative_adaptive": True,
    "speculative_token_map": "map.pt",
    "speculative_use_block_verification": True,
    "speculative_use_rejection_sampling": True,
    "speculative_accept_threshold_single": 0.9,
    "speculative_accept_threshold_acc": 0.5,
    "speculative_draft_window_size": 512,
    "speculative_draft_sink_size": 4,
    "speculative_draft_load_format": "dummy",
    "speculative_draft_attention_backend": "triton",
    "speculative_draft_kv_cache_dtype": "fp8_e5m2",
    "tp_size": 2,
    "pp_size": 2,
    "dp_size": 2,
    "enable_dp_attention": True,
    "attn_cp_size": 2,
    "dcp_size": 2,
    "enable_mixed_chunk": True,
    "enable_two_batch_overlap": True,
    "enable_single_batch_overlap": True,
    "enable_pdmux": True,
    "disaggregation_mode": "prefill",
    "enable_hisparse": True,
    "enable_lora": True,
    "lora_paths": ["adapter"],
    "enable_watermark": True,
    "enable_return_hidden_states": True,
    "enable_memory_saver": True,
    "enable_unified_memory": True,
    "dllm_algorithm": "LowConfidence",
}
# Other values that are fine, apart from the first of `allowed`.
ALSO_FINE = [
    ("speculative_eagle_topk", 1),
    ("speculative_accept_threshold_acc", 1.0),
    ("disaggregation_mode", "null"),
    ("lora_paths", []),
    ("enable_lora", False),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a drafter for it, in one folder."""
    folder = tmp_path_factory.mktemp("models")
    tiny.write_model(folder / "target")
    tiny.write_drafter(folder / "drafter")
    return folder


@pytest.fixture
def args(folders: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Arguments of a server that D3D can serve."""
    for name, _ in server_args._REFUSED_ENV:
        monkeypatch.delenv(name, raising=False)
    return SimpleNamespace(
        **{refusal.field: refusal.allowed[0] for refusal in REFUSALS},
        model_path=str(folders / "target"),
        tokenizer_path=None,
        trust_remote_code=False,
        device="cpu",
        attention_backend=None,
        prefill_attention_backend=None,
        decode_attention_backend=None,
        speculative_draft_model_path=str(folders / "drafter"),
        speculative_num_draft_tokens=None,
        speculative_num_steps=None,
        max_running_requests=None,
    )


def refusal_of(args: SimpleNamespace) -> str:
    with pytest.raises(ValueError) as error:
        validate(args)
    return str(error.value)


def test_a_good_set_of_arguments_passes(args: SimpleNamespace) -> None:
    validate(args)


@pytest.mark.parametrize(("field", "value"), ALSO_FINE)
def test_values_that_change_nothing_pass(args: SimpleNamespace, field: str, value: object) -> None:
    setattr(args, field, value)
    validate(args)


def test_every_refusal_is_tested() -> None:
    assert set(REFUSED) == {refusal.field for refusal in REFUSALS}
    assert len(REFUSALS) == len(REFUSED), "a field is refused twice"


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.field)
def test_a_refused_flag_is_named_with_value_and_reason(
    args: SimpleNamespace, refusal: server_args.Refusal
) -> None:
    value = REFUSED[refusal.field]
    setattr(args, refusal.field, value)
    message = refusal_of(args)
    flag = "--" + refusal.field.replace("_", "-")
    for part in (f"{flag} is {value!r}", "must be", refusal.reason):
        assert part in message
    assert refusal.reason and "unset or unset" not in message


def test_refused_fields_are_arguments_of_sglang_and_their_defaults_pass() -> None:
    cpu_engine.install()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags = {option for action in parser._actions for option in action.option_strings}
    fields = {field.name: field for field in msgspec.structs.fields(ServerArgs)}
    for refusal in REFUSALS:
        assert "--" + refusal.field.replace("_", "-") in flags
        field = fields[refusal.field]
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        assert default in refusal.allowed, f"{refusal.field} is refused at its default {default!r}"


@pytest.mark.parametrize("value", ["1", "true", "4.5"])
@pytest.mark.parametrize("name", [name for name, _ in server_args._REFUSED_ENV])
def test_a_refused_environment_variable_is_named(
    args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    message = refusal_of(args)
    assert name in message and repr(value) in message and "unset" in message
    assert dict(server_args._REFUSED_ENV)[name] in message


@pytest.mark.parametrize("value", ["", "0", "false", "-1"])
def test_an_environment_variable_that_is_off_passes(
    args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    for name, _ in server_args._REFUSED_ENV:
        monkeypatch.setenv(name, value)
    validate(args)


@pytest.mark.parametrize(
    "field", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"]
)
@pytest.mark.parametrize(
    ("device", "backend", "fine"),
    [
        ("cpu", "torch_native", True),
        ("cpu", "triton", False),
        ("cuda", "flashinfer", True),
        ("cuda", "fa3", True),
        ("cuda", "triton", True),
        ("cuda", "trtllm_mha", True),
        ("cuda", "torch_native", False),
        ("cuda", "aiter", False),
    ],
)
def test_attention_backends(args: SimpleNamespace, field: str, device: str, backend: str, fine: bool) -> None:
    args.device = device
    setattr(args, field, backend)
    if fine:
        validate(args)
        return
    message = refusal_of(args)
    assert f"--{field.replace('_', '-')} is {backend!r}" in message and f"allowed on {device}" in message


def test_the_drafter_must_be_named(args: SimpleNamespace) -> None:
    args.speculative_draft_model_path = None
    assert "--speculative-draft-model-path is missing" in refusal_of(args)


def test_a_drafter_that_does_not_exist_is_named(args: SimpleNamespace, tmp_path: Path) -> None:
    args.speculative_draft_model_path = str(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in refusal_of(args)


def test_a_drafter_of_another_vocabulary_is_refused(
    args: SimpleNamespace, folders: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(folders / "target", tmp_path / "other"))
    words = (*tiny.TOKENS[:-2], *reversed(tiny.TOKENS[-2:]))
    tiny.write_tokenizer(other, tokens=words)
    args.model_path = str(other)
    assert "vocabularies" in refusal_of(args)


def test_the_tokenizer_path_is_what_counts_for_the_vocabulary(
    args: SimpleNamespace, folders: Path, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer"
    words = (*tiny.TOKENS[:-2], *reversed(tiny.TOKENS[-2:]))
    tiny.write_tokenizer(tokenizer, tokens=words)
    args.tokenizer_path = str(tokenizer)  # a folder without a model in it
    assert "vocabularies" in refusal_of(args)
    tiny.write_tokenizer(tokenizer)
    validate(args)


@pytest.mark.parametrize(
    ("size", "fine"), [(None, True), (2, True), (4, True), (5, False), (1, False), (0, False), (-3, False)]
)
def test_block_sizes(args: SimpleNamespace, size: int | None, fine: bool) -> None:
    args.speculative_num_draft_tokens = size
    if fine:
        validate(args)
        return
    message = refusal_of(args)
    assert f"--speculative-num-draft-tokens is {size}" in message and "allowed are 2 to 4" in message


@pytest.mark.parametrize(
    ("size", "steps", "fine"), [(None, 3, True), (2, 1, True), (2, 3, False), (None, 4, False)]
)
def test_steps_must_be_one_less_than_the_block(
    args: SimpleNamespace, size: int | None, steps: int, fine: bool
) -> None:
    args.speculative_num_draft_tokens, args.speculative_num_steps = size, steps
    if fine:
        validate(args)
        return
    assert f"--speculative-num-steps is {steps}, it must be unset or {(size or 4) - 1}" in refusal_of(args)


@pytest.mark.parametrize(("given", "size"), [(None, tiny.BLOCK_SIZE), (3, 3)])
@pytest.mark.parametrize(("requested", "running"), [(None, 48), (7, 7)])
def test_settle_sets_what_the_scheduler_sizes_its_buffers_by(
    args: SimpleNamespace, given: int | None, size: int, requested: int | None, running: int
) -> None:
    args.speculative_num_draft_tokens, args.max_running_requests = given, requested
    settle(args)
    assert args.speculative_num_draft_tokens == size
    assert args.speculative_num_steps == size - 1
    assert args.speculative_eagle_topk == 1
    assert args.max_running_requests == running


TARGETS_THAT_PASS = [
    "LlamaConfig",
    "Qwen2Config",
    "Qwen3Config",
    "Qwen3MoeConfig",
    "Olmo2Config",
    "GemmaConfig",
]
TARGETS_REFUSED = [
    ("MistralConfig", {}, "sliding_window 4096"),
    ("Gemma3TextConfig", {}, "sliding_attention"),
    ("Qwen2Config", {"use_sliding_window": True, "max_window_layers": 2}, "sliding_attention"),
    ("GptOssConfig", {}, "sliding_attention"),
    ("Llama4TextConfig", {}, "chunked_attention"),
    ("Qwen3NextConfig", {}, "linear_attention"),
    ("MambaConfig", {}, "linear_attention"),
    ("JambaConfig", {}, "linear_attention"),
    ("FalconH1Config", {}, "hybrid"),
    ("Lfm2Config", {"full_attn_idxs": [2]}, "conv"),
    ("T5Config", {}, "encoder-decoder"),
    ("LlavaConfig", {}, "multimodal"),
    ("Qwen2VLConfig", {}, "multimodal"),
]


def target_config(name: str, **changes: Any) -> transformers.PretrainedConfig:
    """The config of a target that says it is a causal language model."""
    return getattr(transformers, name)(architectures=[name.replace("Config", "ForCausalLM")], **changes)


@pytest.mark.parametrize("name", TARGETS_THAT_PASS)
def test_targets_with_full_attention_pass(name: str) -> None:
    server_args._check_target(target_config(name))


@pytest.mark.parametrize(("name", "changes", "reason"), TARGETS_REFUSED)
def test_other_targets_are_refused(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError) as error:
        server_args._check_target(target_config(name, **changes))
    assert name in str(error.value) and reason in str(error.value)


@pytest.mark.parametrize(
    ("architectures", "named"),
    [
        (["LlamaForSequenceClassification"], "LlamaForSequenceClassification"),
        (["LlamaForCausalLM", "LlamaModel"], "LlamaForCausalLM, LlamaModel"),
        (None, "LlamaConfig"),
    ],
)
def test_a_target_that_is_no_causal_language_model_is_refused(
    architectures: list[str] | None, named: str
) -> None:
    with pytest.raises(ValueError) as error:
        server_args._check_target(transformers.LlamaConfig(architectures=architectures))
    assert f"is a {named}, it must be a causal language model" in str(error.value)


def test_the_target_is_checked_at_start_up(args: SimpleNamespace, folders: Path, tmp_path: Path) -> None:
    windowed = Path(shutil.copytree(folders / "target", tmp_path / "windowed"))
    tiny.edit_json(windowed / "config.json", model_type="mistral", sliding_window=64)
    args.model_path = str(windowed)
    assert "sliding_window 64" in refusal_of(args)
