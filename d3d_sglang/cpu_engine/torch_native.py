"""SGLang's attention backend `torch_native`, taught the verify step of speculative decoding.

The stock backend runs a verify batch as a prefill, but such a batch leaves the fields of a prefill empty:
every row has its cached tokens plus one block, and says so by the block's length only. Imports SGLang's
attention, so it is for the scheduler process alone.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

NAME = "torch_native"


class VerifyingTorchNative(TorchNativeAttnBackend):
    """`torch_native` whose prefill attention also takes verify batches."""

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """Attention of a prefill or verify batch; see the stock class."""
        if forward_batch.forward_mode.is_target_verify():
            forward_batch = as_prefill(forward_batch)
        output: torch.Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return output


def as_prefill(forward_batch: Any) -> Any:
    """A verify batch in the terms of a prefill; a shallow copy, so the batch itself stays as it is.

    Its `seq_lens` [N] counts the cached tokens of a row; that of a prefill counts the new ones too.
    """
    cached = forward_batch.seq_lens
    block_size = forward_batch.spec_info.draft_token_num
    prefill = copy.copy(forward_batch)
    prefill.extend_prefix_lens = cached
    prefill.extend_seq_lens = torch.full_like(cached, block_size)
    prefill.seq_lens = cached + block_size
    return prefill


def install() -> None:
    """Make SGLang build this class when it is asked for `torch_native`."""
    ATTENTION_BACKENDS[NAME] = VerifyingTorchNative
