"""Training attention's forward in Triton: FlashAttention-2 over the tiles that the two-interval rule leaves.

`visible(q, k) = k < ctx[q] or lo[q] <= k < hi[q]` is evaluated from three integers a query; there is no mask
in memory. A program takes one tile of queries and one head. It visits the full tiles of keys without looking
at the rule, the partial ones with it, and never the others (`QueryTiles.ranges`).

Returns the log-sum-exp in base 2, as FlashInfer does, for the backward kernels.

Legend: N rows, W tokens of a row, T tiles of queries, H query heads, G K/V heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl

from d3d_sglang.layout import PackedLayout
from train.attention.tiles import QueryTiles
from train.attention.triton_backward import BackwardPlan, attend
from train.attention.triton_tiles import LOG2_E, Tile, Tiles, default_tiles, dot_precision


@dataclass(frozen=True)
class TritonPlan:
    """A micro-batch whose forward and backward both run in Triton."""

    name: ClassVar[str] = "triton"

    tile: Tile
    ranges: torch.Tensor  # [N, T, 4] int32
    backward: BackwardPlan

    @classmethod
    def make(
        cls, layout: PackedLayout, *, head_dim: int, dtype: torch.dtype, tiles: Tiles | None = None
    ) -> TritonPlan:
        """Bounds of the layout's tiles, on its device and without waiting for it."""
        tiles = tiles or default_tiles(head_dim, dtype)
        return cls(
            tile=tiles.forward,
            ranges=QueryTiles.of(layout, tiles.forward.q).ranges(tiles.forward.kv),
            backward=BackwardPlan.make(layout, tiles=tiles),
        )

    def attend(
        self,
        query: torch.Tensor,  # [N, H, W, D]
        key: torch.Tensor,  # [N, G, W, D]
        value: torch.Tensor,  # [N, G, W, D]
        *,
        scaling: float,
    ) -> torch.Tensor:
        """Attention `[N, W, H, D]`."""
        return attend(query, key, value, forward=self.forward, backward=self.backward, scaling=scaling)

    def forward(
        self,
        query: torch.Tensor,  # [N, W, H, D], contiguous
        key: torch.Tensor,  # [N, W, G, D], contiguous
        value: torch.Tensor,  # [N, W, G, D], contiguous
        *,
        scaling: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention `[N, W, H, D]` and its log-sum-exp `[N, H, W]`, fp32, base 2; no graph."""
        assert scaling > 0, f"scaling is {scaling}"
        num_rows, num_tokens, num_heads, head_dim = query.shape
        out = torch.empty_like(query)
        lse = torch.empty(num_rows, num_heads, num_tokens, dtype=torch.float32, device=query.device)
        rule = (self.backward.ctx, self.backward.lo, self.backward.hi)
        _forward_kernel[(num_rows * num_heads, self.ranges.shape[1])](
            *(query, key, value, out, lse, *rule, self.ranges),
            num_tokens=num_tokens,
            scale_log2=scaling * LOG2_E,
            num_heads=num_heads,
            group=num_heads // key.shape[2],
            head_dim=head_dim,
            precision=dot_precision(query.dtype),
            **self.tile.options,
        )
        return out, lse


@triton.jit
def _forward_kernel(  # noqa: PLR0913, PLR0915
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    ctx_ptr,
    lo_ptr,
    hi_ptr,
    ranges_ptr,
    num_tokens,
    scale_log2,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_q: tl.constexpr,
    block_kv: tl.constexpr,
    precision: tl.constexpr,
):
    q_token: tl.constexpr = num_heads * head_dim
    kv_token: tl.constexpr = q_token // group
    num_tiles = tl.num_programs(1)
    # The last blocks have the longest contexts: they start first, so that no long program is left over.
    tile = num_tiles - 1 - tl.program_id(1)
    row = (tl.program_id(0) // num_heads).to(tl.int64)
    head = tl.program_id(0) % num_heads

    q_index = tile * block_q + tl.arange(0, block_q)
    exists = q_index < num_tokens
    d = tl.arange(0, head_dim)
    ctx = tl.load(ctx_ptr + row * num_tokens + q_index, mask=exists, other=0)[:, None]
    lo = tl.load(lo_ptr + row * num_tokens + q_index, mask=exists, other=0)[:, None]
    hi = tl.load(hi_ptr + row * num_tokens + q_index, mask=exists, other=0)[:, None]
    q_start = q_ptr + row * num_tokens * q_token + head * head_dim
    q = tl.load(q_start + q_index[:, None] * q_token + d[None, :], mask=exists[:, None], other=0.0)
    k_start = k_ptr + row * num_tokens * kv_token + (head // group) * head_dim
    v_start = v_ptr + row * num_tokens * kv_token + (head // group) * head_dim

    ranges_start = ranges_ptr + (row * num_tiles + tile) * 4
    full_end = tl.load(ranges_start)
    num_partial = tl.load(ranges_start + 1) - full_end
    segment_start = tl.load(ranges_start + 2)
    num_masked = num_partial + tl.load(ranges_start + 3) - segment_start

    row_max = tl.full([block_q], float("-inf"), tl.float32)
    row_sum = tl.zeros([block_q], tl.float32)
    acc = tl.zeros([block_q, head_dim], tl.float32)
    for kv_tile in range(full_end):
        k_index = kv_tile * block_kv + tl.arange(0, block_kv)
        k = tl.load(k_start + k_index[None, :] * kv_token + d[:, None])
        v = tl.load(v_start + k_index[:, None] * kv_token + d[None, :])
        scores = tl.dot(q, k, input_precision=precision)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        probs = tl.exp2(scores * scale_log2 - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(probs, 1)
        acc = tl.dot(probs.to(v.dtype), v, acc * shrink[:, None], input_precision=precision)
        row_max = new_max
    for i in range(num_masked):
        kv_tile = tl.where(i < num_partial, full_end + i, segment_start + i - num_partial)
        k_index = kv_tile * block_kv + tl.arange(0, block_kv)
        inside = k_index < num_tokens
        k = tl.load(k_start + k_index[None, :] * kv_token + d[:, None], mask=inside[None, :], other=0.0)
        v = tl.load(v_start + k_index[:, None] * kv_token + d[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=precision)
        key = k_index[None, :]
        scores = tl.where((key < ctx) | ((lo <= key) & (key < hi)), scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        # A query may have seen nothing yet: -inf - -inf is no number.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        probs = tl.exp2(scores * scale_log2 - shift[:, None])
        shrink = tl.exp2(row_max - shift)
        row_sum = row_sum * shrink + tl.sum(probs, 1)
        acc = tl.dot(probs.to(v.dtype), v, acc * shrink[:, None], input_precision=precision)
        row_max = new_max

    out_start = out_ptr + row * num_tokens * q_token + head * head_dim
    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_start + q_index[:, None] * q_token + d[None, :], out, mask=exists[:, None])
    lse_start = lse_ptr + (row * num_heads + head) * num_tokens
    tl.store(lse_start + q_index, row_max + tl.log2(row_sum), mask=exists)
