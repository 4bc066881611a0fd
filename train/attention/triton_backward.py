"""Training attention's backward in Triton: FlashAttention-2 over the tiles that the two-interval rule leaves.

`visible(q, k) = k < ctx[q] or lo[q] <= k < hi[q]` is evaluated from three integers a query; there is no mask
in memory. Probabilities are recomputed from the forward's log-sum-exp in base 2, whoever made it: FlashInfer
and our own forward have the same. Two kernels, neither with atomics, so that gradients repeat bit by bit:

- dq: a program takes one tile of queries and one head, and visits the ranges of keys the forward visits. It
  also stores delta, the sum of out * grad_out over the head dimension.
- dk, dv: a program takes one tile of keys and one K/V head, and visits the tiles of queries that see it, for
  every query head of the group, from two lists: full ones, which do not look at the rule, and partial ones.

Legend: N rows, W tokens of a row, T tiles of queries, J tiles of keys, H query heads, G K/V heads, D head
size, delta as above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from d3d_sglang.layout import PackedLayout
from train.attention.tiles import QueryTiles, index_lists
from train.attention.triton_tiles import LOG2_E, Tiles, dot_precision


class Forward(Protocol):
    """A forward without a graph, over contiguous tensors.

    From query `[N, W, H, D]`, key and value `[N, W, G, D]`: attention `[N, W, H, D]` and its log-sum-exp
    `[N, H, W]` in fp32 and base 2.
    """

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True)
class BackwardPlan:
    """The rule of a micro-batch, and which tiles its backward visits."""

    tiles: Tiles
    ctx: torch.Tensor  # [N, W] int32
    lo: torch.Tensor  # [N, W] int32
    hi: torch.Tensor  # [N, W] int32
    kv_ranges: torch.Tensor  # [N, T, 4] int32, for dq
    num_full: torch.Tensor  # [N, J] int32, for dk and dv
    full: torch.Tensor  # [N, J, T] int32, tiles of queries
    num_partial: torch.Tensor  # [N, J] int32
    partial: torch.Tensor  # [N, J, T] int32

    @classmethod
    def make(cls, layout: PackedLayout, *, tiles: Tiles) -> BackwardPlan:
        """Bounds and lists of the layout's tiles, on its device and without waiting for it."""
        seen_by = QueryTiles.of(layout, tiles.dkdv.q)
        full = seen_by.full(tiles.dkdv.kv)  # [N, T, J]
        partial = seen_by.visible(tiles.dkdv.kv) & ~full
        num_full, full_index = index_lists(full.transpose(1, 2))
        num_partial, partial_index = index_lists(partial.transpose(1, 2))
        return cls(
            tiles=tiles,
            ctx=layout.ctx.to(torch.int32),
            lo=layout.lo.to(torch.int32),
            hi=layout.hi.to(torch.int32),
            kv_ranges=QueryTiles.of(layout, tiles.dq.q).ranges(tiles.dq.kv),
            num_full=num_full,
            full=full_index,
            num_partial=num_partial,
            partial=partial_index,
        )

    def gradients(
        self,
        query: torch.Tensor,  # [N, W, H, D]
        key: torch.Tensor,  # [N, W, G, D]
        value: torch.Tensor,  # [N, W, G, D]
        *,
        out: torch.Tensor,  # [N, W, H, D], what the forward returned
        lse: torch.Tensor,  # [N, H, W], likewise
        grad_out: torch.Tensor,  # [N, W, H, D]
        scaling: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk and dv, shaped and typed like query, key and value. All tensors are contiguous."""
        dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        delta = torch.empty_like(lse)
        num_rows, num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = key.shape[2]
        inputs = (query, key, value, grad_out, lse, delta, self.ctx, self.lo, self.hi)
        constants = {
            "scale": scaling,
            "scale_log2": scaling * LOG2_E,
            "num_heads": num_heads,
            "group": num_heads // num_kv_heads,
            "head_dim": head_dim,
            "precision": dot_precision(query.dtype),
        }
        _dq_kernel[(num_rows * num_heads, self.kv_ranges.shape[1])](
            *inputs, out, dq, self.kv_ranges, num_tokens, **self.tiles.dq.options, **constants
        )
        lists = (self.num_full, self.full, self.num_partial, self.partial)
        _dkdv_kernel[(num_rows * num_kv_heads, self.num_full.shape[1])](
            *inputs, dk, dv, *lists, num_tokens, self.full.shape[2], **self.tiles.dkdv.options, **constants
        )
        return dq, dk, dv


# Not traced: a compiled model calls these kernels as they are.
@torch.compiler.disable
def attend(
    query: torch.Tensor,  # [N, H, W, D]
    key: torch.Tensor,  # [N, G, W, D]
    value: torch.Tensor,  # [N, G, W, D]
    *,
    forward: Forward,
    backward: BackwardPlan,
    scaling: float,
) -> torch.Tensor:
    """Attention `[N, W, H, D]` by `forward`, differentiable by the kernels here."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return _MaskedAttention.apply(query, key, value, forward, backward, scaling)


class _MaskedAttention(torch.autograd.Function):
    """Some forward and the kernels of this module behind it."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        forward: Forward,
        backward: BackwardPlan,
        scaling: float,
    ) -> torch.Tensor:
        # Projections leave tokens before heads in memory, so that this copies nothing.
        query, key, value = (x.contiguous() for x in (query, key, value))
        out, lse = forward(query, key, value, scaling=scaling)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.backward_plan, ctx.scaling = backward, scaling
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        plan: BackwardPlan = ctx.backward_plan
        grad_out = grad_out.contiguous()
        grads = plan.gradients(query, key, value, out=out, lse=lse, grad_out=grad_out, scaling=ctx.scaling)
        return *grads, None, None, None


@triton.jit
def _dq_kernel(  # noqa: PLR0913, PLR0915
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    ctx_ptr,
    lo_ptr,
    hi_ptr,
    out_ptr,
    dq_ptr,
    ranges_ptr,
    num_tokens,
    scale,
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
    tile = num_tiles - 1 - tl.program_id(1)  # long contexts first, as in the forward
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
    do_start = do_ptr + row * num_tokens * q_token + head * head_dim
    do = tl.load(do_start + q_index[:, None] * q_token + d[None, :], mask=exists[:, None], other=0.0)
    out_start = out_ptr + row * num_tokens * q_token + head * head_dim
    out = tl.load(out_start + q_index[:, None] * q_token + d[None, :], mask=exists[:, None], other=0.0)
    # Infinite where there is no query: its probabilities are zero.
    lse_start = lse_ptr + (row * num_heads + head) * num_tokens
    lse = tl.load(lse_start + q_index, mask=exists, other=float("inf"))[:, None]
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + (row * num_heads + head) * num_tokens + q_index, delta, mask=exists)
    delta = delta[:, None]
    k_start = k_ptr + row * num_tokens * kv_token + (head // group) * head_dim
    v_start = v_ptr + row * num_tokens * kv_token + (head // group) * head_dim

    ranges_start = ranges_ptr + (row * num_tiles + tile) * 4
    full_end = tl.load(ranges_start)
    num_partial = tl.load(ranges_start + 1) - full_end
    segment_start = tl.load(ranges_start + 2)
    num_masked = num_partial + tl.load(ranges_start + 3) - segment_start

    dq = tl.zeros([block_q, head_dim], tl.float32)
    for kv_tile in range(full_end):
        k_index = kv_tile * block_kv + tl.arange(0, block_kv)
        k = tl.load(k_start + k_index[None, :] * kv_token + d[:, None])  # [D, kv]
        v = tl.load(v_start + k_index[None, :] * kv_token + d[:, None])
        probs = tl.exp2(tl.dot(q, k, input_precision=precision) * scale_log2 - lse)
        dprobs = tl.dot(do, v, input_precision=precision)
        dscores = (probs * (dprobs - delta)).to(k.dtype)
        dq = tl.dot(dscores, tl.trans(k), dq, input_precision=precision)
    for i in range(num_masked):
        kv_tile = tl.where(i < num_partial, full_end + i, segment_start + i - num_partial)
        k_index = kv_tile * block_kv + tl.arange(0, block_kv)
        inside = (k_index < num_tokens)[None, :]
        k = tl.load(k_start + k_index[None, :] * kv_token + d[:, None], mask=inside, other=0.0)
        v = tl.load(v_start + k_index[None, :] * kv_token + d[:, None], mask=inside, other=0.0)
        probs = tl.exp2(tl.dot(q, k, input_precision=precision) * scale_log2 - lse)
        key = k_index[None, :]
        probs = tl.where((key < ctx) | ((lo <= key) & (key < hi)), probs, 0.0)
        dprobs = tl.dot(do, v, input_precision=precision)
        dscores = (probs * (dprobs - delta)).to(k.dtype)
        dq = tl.dot(dscores, tl.trans(k), dq, input_precision=precision)

    dq_start = dq_ptr + row * num_tokens * q_token + head * head_dim
    dq = (dq * scale).to(dq_ptr.dtype.element_ty)
    tl.store(dq_start + q_index[:, None] * q_token + d[None, :], dq, mask=exists[:, None])


@triton.jit
def _dkdv_kernel(  # noqa: PLR0913, PLR0915
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    ctx_ptr,
    lo_ptr,
    hi_ptr,
    dk_ptr,
    dv_ptr,
    num_full_ptr,
    full_ptr,
    num_partial_ptr,
    partial_ptr,
    num_tokens,
    num_q_tiles,
    scale,
    scale_log2,
    num_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_q: tl.constexpr,
    block_kv: tl.constexpr,
    precision: tl.constexpr,
):
    # Everything here is transposed, [kv, q]: dk and dv then accumulate without a transposed operand.
    num_kv_heads: tl.constexpr = num_heads // group
    q_token: tl.constexpr = num_heads * head_dim
    kv_token: tl.constexpr = num_kv_heads * head_dim
    kv_tile = tl.program_id(1)  # the first keys are seen by most queries: they start first
    row = (tl.program_id(0) // num_kv_heads).to(tl.int64)
    kv_head = tl.program_id(0) % num_kv_heads

    k_index = kv_tile * block_kv + tl.arange(0, block_kv)
    inside = (k_index < num_tokens)[:, None]
    d = tl.arange(0, head_dim)
    k_start = k_ptr + row * num_tokens * kv_token + kv_head * head_dim
    k = tl.load(k_start + k_index[:, None] * kv_token + d[None, :], mask=inside, other=0.0)
    v_start = v_ptr + row * num_tokens * kv_token + kv_head * head_dim
    v = tl.load(v_start + k_index[:, None] * kv_token + d[None, :], mask=inside, other=0.0)

    list_index = row * tl.num_programs(1) + kv_tile
    num_full = tl.load(num_full_ptr + list_index)
    num_partial = tl.load(num_partial_ptr + list_index)
    full_start = full_ptr + list_index * num_q_tiles
    partial_start = partial_ptr + list_index * num_q_tiles
    dk = tl.zeros([block_kv, head_dim], tl.float32)
    dv = tl.zeros([block_kv, head_dim], tl.float32)
    for in_group in range(group):
        head = kv_head * group + in_group
        q_start = q_ptr + row * num_tokens * q_token + head * head_dim
        do_start = do_ptr + row * num_tokens * q_token + head * head_dim
        lse_start = lse_ptr + (row * num_heads + head) * num_tokens
        delta_start = delta_ptr + (row * num_heads + head) * num_tokens
        # The next tile's number is read one step ahead: addresses never wait for it.
        tile = tl.load(full_start)
        for i in range(num_full):
            next_tile = tl.load(full_start + tl.minimum(i + 1, num_q_tiles - 1))
            q_index = tile * block_q + tl.arange(0, block_q)
            q = tl.load(q_start + q_index[:, None] * q_token + d[None, :])
            lse = tl.load(lse_start + q_index)[None, :]
            probs = tl.exp2(tl.dot(k, tl.trans(q), input_precision=precision) * scale_log2 - lse)
            do = tl.load(do_start + q_index[:, None] * q_token + d[None, :])
            dv = tl.dot(probs.to(do.dtype), do, dv, input_precision=precision)
            delta = tl.load(delta_start + q_index)[None, :]
            dprobs = tl.dot(v, tl.trans(do), input_precision=precision)
            dscores = (probs * (dprobs - delta)).to(q.dtype)
            dk = tl.dot(dscores, q, dk, input_precision=precision)
            tile = next_tile
        tile = tl.load(partial_start)
        for i in range(num_partial):
            next_tile = tl.load(partial_start + tl.minimum(i + 1, num_q_tiles - 1))
            q_index = tile * block_q + tl.arange(0, block_q)
            exists = q_index < num_tokens
            q_offset = q_index[:, None]
            q = tl.load(q_start + q_offset * q_token + d[None, :], mask=exists[:, None], other=0.0)
            lse = tl.load(lse_start + q_index, mask=exists, other=float("inf"))[None, :]
            ctx = tl.load(ctx_ptr + row * num_tokens + q_index, mask=exists, other=0)[None, :]
            lo = tl.load(lo_ptr + row * num_tokens + q_index, mask=exists, other=0)[None, :]
            hi = tl.load(hi_ptr + row * num_tokens + q_index, mask=exists, other=0)[None, :]
            probs = tl.exp2(tl.dot(k, tl.trans(q), input_precision=precision) * scale_log2 - lse)
            key = k_index[:, None]
            probs = tl.where((key < ctx) | ((lo <= key) & (key < hi)), probs, 0.0)
            do = tl.load(do_start + q_offset * q_token + d[None, :], mask=exists[:, None], other=0.0)
            dv = tl.dot(probs.to(do.dtype), do, dv, input_precision=precision)
            delta = tl.load(delta_start + q_index, mask=exists, other=0.0)[None, :]
            dprobs = tl.dot(v, tl.trans(do), input_precision=precision)
            dscores = (probs * (dprobs - delta)).to(q.dtype)
            dk = tl.dot(dscores, q, dk, input_precision=precision)
            tile = next_tile

    dk_start = dk_ptr + row * num_tokens * kv_token + kv_head * head_dim
    dk = (dk * scale).to(dk_ptr.dtype.element_ty)
    tl.store(dk_start + k_index[:, None] * kv_token + d[None, :], dk, mask=inside)
    dv_start = dv_ptr + row * num_tokens * kv_token + kv_head * head_dim
    tl.store(dv_start + k_index[:, None] * kv_token + d[None, :], dv.to(dv_ptr.dtype.element_ty), mask=inside)
