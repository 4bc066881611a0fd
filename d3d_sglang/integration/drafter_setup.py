"""Puts a checked drafter on its device: weights first, then cache and executor once the rows are known."""

from __future__ import annotations

from typing import Any

import torch

from d3d_sglang.drafter.checkpoint import DrafterCheckpoint
from d3d_sglang.drafter.executor import DrafterExecutor
from d3d_sglang.drafter.kv_cache import CacheShape, RowCache
from d3d_sglang.drafter.model import DrafterModel
from d3d_sglang.options import D3DOptions


def load_model(checkpoint: DrafterCheckpoint, *, target_runner: Any, options: D3DOptions) -> DrafterModel:
    """Load the drafter's weights, in the target's dtype.

    Raises:
        ValueError: the drafter device does not exist.
    """
    device = _device(options.drafter_device, target=torch.device(target_runner.device, target_runner.gpu_id))
    return DrafterModel(
        checkpoint.path,
        mask_token_id=checkpoint.d3d_config.mask_token_id,
        vocab_size=target_runner.model_config.vocab_size,
        device=device,
        dtype=target_runner.dtype,
    )


def make_executor(
    model: DrafterModel, checkpoint: DrafterCheckpoint, *, num_rows: int, block_size: int, context_len: int
) -> DrafterExecutor:
    """Allocate the cache: the tokens both models can hold, and the slots a pass writes past them.

    Raises:
        ValueError: the device has not enough free memory for it.
    """
    shape = CacheShape(
        num_layers=model.num_layers,
        num_rows=num_rows,
        # One block may start at the last committed token, one slot takes what overflows.
        capacity=min(context_len, checkpoint.max_position_embeddings) + 2 * block_size + 1,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=model.dtype,
    )
    _check_memory(shape, model.device)
    cache = RowCache(shape, model.device)
    return DrafterExecutor(
        model, cache, block_size=block_size, mask_token_id=checkpoint.d3d_config.mask_token_id
    )


def _device(wanted: str, *, target: torch.device) -> torch.device:
    if wanted == "target":
        return torch.device("cpu") if target.type == "cpu" else target
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--d3d-drafter-device is {wanted!r}, but there are {torch.cuda.device_count()} CUDA devices here"
        )
    return device


def _check_memory(shape: CacheShape, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if shape.num_bytes > free:
        raise ValueError(
            f"the drafter's K/V cache needs {shape.num_bytes / 2**30:.1f} GiB "
            f"({shape.num_rows} rows x {shape.capacity} tokens), "
            f"{free / 2**30:.1f} GiB are free on {device}: "
            "lower --max-running-requests, --context-length or --mem-fraction-static"
        )
