"""Which server arguments D3D works with: refused ones, with the reason, and those it sets.

Everything here runs at start-up, before weights are loaded, on SGLang's resolved arguments. A refusal names
the flag, its value and what is allowed.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from d3d_sglang.drafter.checkpoint import DrafterCheckpoint, check_pair, read_drafter
from d3d_sglang.integration.drafter_setup import make_planner, read_options

logger = logging.getLogger(__name__)

CPU_BACKENDS = ("torch_native",)
GPU_BACKENDS = ("flashinfer", "fa3", "triton", "trtllm_mha")
DEFAULT_MAX_RUNNING_REQUESTS = 48  # what SGLang sets for its own speculative algorithms


@dataclass(frozen=True)
class Refusal:
    """A field that must keep one of `allowed` under D3D, and why."""

    field: str
    allowed: tuple[object, ...]
    reason: str

    def check(self, args: Any) -> None:
        value = getattr(args, self.field)
        if value not in self.allowed:
            flag = "--" + self.field.replace("_", "-")
            allowed = dict.fromkeys("unset" if x in (None, False, []) else repr(x) for x in self.allowed)
            raise ValueError(f"D3D: {flag} is {value!r}, it must be {' or '.join(allowed)}: {self.reason}")


_NOT_LOSSLESS = "accepting by threshold changes the output distribution"
_WHOLE_CONTEXT = "the drafter reads the whole context"
_OWN_LOADER = "the drafter is no model of SGLang's: it is loaded and run by D3D"
_ONE_ENGINE = "the drafter serves one scheduler in one process"
_OFF: tuple[object, ...] = (None, False)

REFUSALS: tuple[Refusal, ...] = (
    Refusal("speculative_eagle_topk", (None, 1), "D3D verifies a chain, not a tree"),
    Refusal("speculative_adaptive", _OFF, "the verify width of a D3D server is the block size"),
    Refusal("speculative_token_map", (None,), "drafter and target must share one vocabulary"),
    Refusal(
        "speculative_use_block_verification", _OFF, "it needs the draft probabilities of in-tree drafters"
    ),
    Refusal("speculative_use_rejection_sampling", _OFF, "D3D has its own exact acceptance rule"),
    Refusal("speculative_accept_threshold_single", (None, 1.0), _NOT_LOSSLESS),
    Refusal("speculative_accept_threshold_acc", (None, 1.0), _NOT_LOSSLESS),
    Refusal("speculative_draft_window_size", (None,), _WHOLE_CONTEXT),
    Refusal("speculative_draft_sink_size", (None,), _WHOLE_CONTEXT),
    Refusal("speculative_draft_load_format", (None, "auto"), _OWN_LOADER),
    Refusal("speculative_draft_attention_backend", (None,), _OWN_LOADER),
    Refusal("speculative_draft_kv_cache_dtype", (None, "auto"), "the drafter's cache has the target's dtype"),
    Refusal(
        "tp_size", (1,), "tensor parallelism is not supported yet; start replicas behind a router instead"
    ),
    Refusal("pp_size", (1,), _ONE_ENGINE),
    Refusal("dp_size", (1,), "start replicas behind a router instead"),
    Refusal("enable_dp_attention", _OFF, _ONE_ENGINE),
    Refusal("attn_cp_size", (None, 1), _ONE_ENGINE),
    Refusal("dcp_size", (None, 1), _ONE_ENGINE),
    Refusal("enable_mixed_chunk", _OFF, "a verify batch cannot hold prefill tokens"),
    Refusal("enable_two_batch_overlap", _OFF, "it splits the verify batch"),
    Refusal("enable_single_batch_overlap", _OFF, "it reorders the verify forward"),
    Refusal("enable_pdmux", _OFF, "it runs prefill and decode on streams of its own"),
    Refusal("disaggregation_mode", (None, "null"), "the drafter needs prefill and decode in one server"),
    Refusal("enable_hisparse", _OFF, "it selects target K/V the verify block must see"),
    Refusal("enable_lora", _OFF, "the drafter is trained for one target"),
    Refusal("lora_paths", (None, []), "the drafter is trained for one target"),
    Refusal("enable_watermark", _OFF, "watermarks are forced on single tokens only"),
    Refusal("enable_return_hidden_states", _OFF, "verify rows past the accepted ones have no meaning"),
    Refusal("enable_memory_saver", _OFF, "the drafter cannot release its memory yet"),
    Refusal("enable_unified_memory", _OFF, "the drafter's memory is not in the unified pool"),
    Refusal("dllm_algorithm", (None,), "the target must be autoregressive"),
)

_REFUSED_ENV: tuple[tuple[str, str], ...] = (
    ("SGLANG_SIMULATE_ACC_LEN", "it overwrites accept lengths"),
    ("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "it freezes the attention plan of the verify block"),
)


def validate(args: Any) -> None:
    """Refuse what D3D cannot serve correctly.

    Raises:
        ValueError: naming the argument, its value, what is allowed and why.
    """
    for refusal in REFUSALS:
        refusal.check(args)
    for name, reason in _REFUSED_ENV:
        if os.environ.get(name, "").lower() not in ("", "0", "false", "-1"):
            raise ValueError(
                f"D3D: environment variable {name} is {os.environ[name]!r}, it must be unset: {reason}"
            )
    _check_attention_backends(args)
    _check_target(AutoConfig.from_pretrained(args.model_path, trust_remote_code=bool(args.trust_remote_code)))
    drafter = load_checkpoint(args)
    for warning in check_pair(drafter, args.model_path, tokenizer_path=args.tokenizer_path):
        logger.warning("D3D: %s", warning)
    _check_block(args, drafter)
    size = block_size(args, drafter)
    make_planner(read_options(os.environ, drafter, block_size=size), block_size=size)


def load_checkpoint(args: Any) -> DrafterCheckpoint:
    """The drafter named by `--speculative-draft-model-path`, checked."""
    path = args.speculative_draft_model_path
    if not path:
        raise ValueError(
            "D3D: --speculative-draft-model-path is missing: give a drafter folder (`d3d init-drafter`)"
        )
    return read_drafter(path)


def block_size(args: Any, drafter: DrafterCheckpoint) -> int:
    """Tokens of a block: `--speculative-num-draft-tokens` if given, else what the drafter was made for."""
    given = args.speculative_num_draft_tokens
    return drafter.d3d_config.block_size if given is None else int(given)


def settle(args: Any) -> None:
    """Set the fields the scheduler sizes its buffers by."""
    size = block_size(args, load_checkpoint(args))
    args.speculative_num_draft_tokens = size
    args.speculative_num_steps = size - 1
    args.speculative_eagle_topk = 1
    if args.max_running_requests is None:
        args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS


def _check_block(args: Any, drafter: DrafterCheckpoint) -> None:
    trained, size = drafter.d3d_config.block_size, block_size(args, drafter)
    if not 2 <= size <= trained:
        raise ValueError(
            f"D3D: --speculative-num-draft-tokens is {size}, allowed are 2 to {trained}: "
            f"the drafter {drafter.path} was made for blocks of {trained} tokens"
        )
    steps = args.speculative_num_steps
    if steps not in (None, size - 1):
        raise ValueError(
            f"D3D: --speculative-num-steps is {steps}, it must be unset or {size - 1} (block size - 1)"
        )


def _check_attention_backends(args: Any) -> None:
    allowed = CPU_BACKENDS if args.device == "cpu" else GPU_BACKENDS
    for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        value = getattr(args, field)
        if value is not None and value not in allowed:
            flag = "--" + field.replace("_", "-")
            raise ValueError(
                f"D3D: {flag} is {value!r}, allowed on {args.device} are {', '.join(allowed)}: "
                "others do not run a causal verify block"
            )


def _check_target(config: PretrainedConfig) -> None:
    kind = type(config).__name__
    names = config.architectures or [kind]
    if not all(name.endswith("ForCausalLM") for name in names):
        raise ValueError(f"D3D: the target is a {', '.join(names)}, it must be a causal language model")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"D3D: the target ({kind}) is an encoder-decoder model, it must be decoder-only")
    for part in ("vision_config", "audio_config", "text_config"):
        if getattr(config, part, None) is not None:
            raise ValueError(f"D3D: the target ({kind}) has a {part}: multimodal targets are not supported")
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        other = ", ".join(sorted(layer_types - {"full_attention"}))
        raise ValueError(f"D3D: the target ({kind}) has {other} layers: only full attention is supported")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise ValueError(
            f"D3D: the target ({kind}) has sliding_window {config.sliding_window}: not supported"
        )
