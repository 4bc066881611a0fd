"""Puts a checked drafter on its device: weights first, then cache and executor once the rows are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from d3d_sglang.branch.planner import BranchPlanner
from d3d_sglang.drafter.checkpoint import DrafterCheckpoint
from d3d_sglang.drafter.executor import DrafterExecutor
from d3d_sglang.drafter.kv_cache import CacheShape, PagedCache
from d3d_sglang.drafter.model import DrafterModel
from d3d_sglang.drafter.page_pool import PagePool
from d3d_sglang.drafter.rows import Alive, DrafterRows
from d3d_sglang.drafting import Drafting
from d3d_sglang.options import D3DOptions, resolve_options
from d3d_sglang.proposals import ProposalStore

PAGE_SIZE = 16  # tokens
SUPPORT = 20  # K, drafter tokens kept per position: for branches and for exact sampling


@dataclass(frozen=True)
class ServerSizes:
    """What the server's own pools fix."""

    num_rows: int
    block_size: int
    context_len: int
    max_total_tokens: int

    def max_cached_tokens(self, reserve: int) -> int:
        """Tokens all rows can have at once, and `reserve` for each row's blocks past its end."""
        return min(self.max_total_tokens, self.num_rows * self.context_len) + self.num_rows * reserve


def target_device(runner: Any) -> torch.device:
    """The device a target's runner is on, with its index."""
    return torch.device("cpu") if runner.device == "cpu" else torch.device(runner.device, runner.gpu_id)


def load_model(checkpoint: DrafterCheckpoint, *, target_runner: Any, options: D3DOptions) -> DrafterModel:
    """Load the drafter's weights, in the target's dtype.

    Raises:
        ValueError: the drafter device does not exist.
    """
    device = _device(options.drafter_device, target=target_device(target_runner))
    return DrafterModel(
        checkpoint.path,
        mask_token_id=checkpoint.d3d_config.mask_token_id,
        vocab_size=target_runner.model_config.vocab_size,
        device=device,
        dtype=target_runner.dtype,
    )


def read_options(environ: Mapping[str, str], checkpoint: DrafterCheckpoint, *, block_size: int) -> D3DOptions:
    """The options in effect for a drafter; its own coverage is cut to a smaller block. Raises ValueError."""
    own = checkpoint.d3d_config
    return resolve_options(environ, coverage=min(own.coverage, block_size), fanout=own.fanout)


def make_planner(options: D3DOptions, *, block_size: int) -> BranchPlanner | None:
    """The branches to draft ahead, None for synchronous drafting.

    Raises:
        ValueError: the coverage is larger than the block, or the fan-out than what is kept per position.
    """
    if options.mode == "sync":
        return None
    if options.fanout >= SUPPORT:
        raise ValueError(f"--d3d-fanout is {options.fanout}, allowed are 1 to {SUPPORT - 1}")
    return BranchPlanner(block_size=block_size, coverage=options.coverage, fanout=options.fanout)


def make_drafting(
    model: DrafterModel,
    checkpoint: DrafterCheckpoint,
    *,
    sizes: ServerSizes,
    options: D3DOptions,
    device: torch.device,
    alive: Callable[[], Alive],
) -> Drafting:
    """Allocate the cache and the row state; `device` is the target's, `alive` as in `DrafterRows`.

    Raises:
        ValueError: as `make_planner`, or the device has not enough free memory.
    """
    planner = make_planner(options, block_size=sizes.block_size)
    reserve = 3 * sizes.block_size + PAGE_SIZE
    shape = CacheShape(
        num_layers=model.num_layers,
        num_rows=sizes.num_rows,
        num_pages=-(-sizes.max_cached_tokens(reserve) // PAGE_SIZE),
        page_size=PAGE_SIZE,
        max_length=min(sizes.context_len, checkpoint.max_position_embeddings) + reserve,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=model.dtype,
    )
    _check_memory(shape, model.device)
    executor = DrafterExecutor(
        model,
        PagedCache(shape, model.device),
        block_size=sizes.block_size,
        mask_token_id=checkpoint.d3d_config.mask_token_id,
        support=SUPPORT,
    )
    pool = PagePool(num_pages=shape.num_pages, page_size=PAGE_SIZE, num_rows=sizes.num_rows)
    rows = DrafterRows(
        executor,
        pool,
        max_positions=checkpoint.max_position_embeddings,
        packed=planner is not None,
        alive=alive,
    )
    store = ProposalStore(
        num_rows=sizes.num_rows, block_size=sizes.block_size, support=SUPPORT, device=model.device
    )
    return Drafting(
        rows,
        store,
        device=device,
        planner=planner,
        sibling=options.miss == "sibling",
    )


def _device(wanted: str, *, target: torch.device) -> torch.device:
    if wanted == "target":
        return target
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
            f"({shape.num_pages} pages of {shape.page_size} tokens), "
            f"{free / 2**30:.1f} GiB are free on {device}: "
            "lower --max-running-requests, --context-length or --mem-fraction-static"
        )
