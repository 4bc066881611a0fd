"""Training attention with FlashInfer's custom-mask prefill as its forward, and our Triton backward.

With a custom mask FlashInfer's kernel (fa2, the only backend that takes one) walks every key of a request and
tests one bit a pair. Given whole rows it would do the work of a dense mask. So a request here is not a row
but a tile of 128 successive queries, and its page table lists only the pages of keys that some query of the
tile sees: keys are skipped by not being there. K and V are used as pages where they lie, without a copy. What
is left of the dense cost is the bit test, also inside fully visible pages; `triton_forward` has none there.

FlashInfer's batch is planned on the host: a plan waits for the device once, to learn how many pages each
tile has. `plan()` gets the mask as bools: with `packed_custom_mask` it takes offsets counted in bits for
offsets in bytes, which is wrong from the second request on.

Legend: N rows, W tokens of a row, T tiles of queries, P pages of a row, H query heads, G K/V heads, D head
size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper

from d3d_sglang.layout import PackedLayout
from d3d_sglang.masks import visible
from train.attention.tiles import QueryTiles
from train.attention.triton_backward import BackwardPlan, attend
from train.attention.triton_tiles import default_tiles

# With a group of 2, 3 or 4 heads a whole number of the kernel's own tiles of 128.
QUERY_TILE = 128
MAX_PAGE_SIZE = 64
HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
MAX_MASK_BITS = 2**31 - 1  # FlashInfer's offsets are int32
# Only split requests use the workspace, and none is split.
WORKSPACE_BYTES = 1 << 20


@dataclass(frozen=True)
class FlashInferPlan:
    """A micro-batch planned for one wrapper, which all its layers share."""

    name: ClassVar[str] = "flashinfer"

    wrapper: BatchPrefillWithPagedKVCacheWrapper
    page_size: int
    scaling: float
    backward: BackwardPlan

    @classmethod
    def make(
        cls,
        layout: PackedLayout,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        scaling: float,
    ) -> FlashInferPlan:
        """Plan the forward and the backward of `layout`; waits for its device.

        Raises:
            ValueError: FlashInfer has no kernel for the head size or type, or the mask is too large.
        """
        if head_dim not in HEAD_DIMS:
            raise ValueError(
                f"head_dim {head_dim} has no FlashInfer kernel here; it may be one of {HEAD_DIMS}"
            )
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype} has no FlashInfer kernel; it may be one of {DTYPES}")
        num_rows, num_tokens = layout.ctx.shape
        device = layout.ctx.device
        page_size = math.gcd(num_tokens, MAX_PAGE_SIZE)
        pages = visible_pages(layout, page_size=page_size)  # [N, T, P]
        num_pages = pages.sum(2).flatten().tolist()
        num_queries = [min(QUERY_TILE, num_tokens - q) for q in range(0, num_tokens, QUERY_TILE)] * num_rows
        num_bits = sum(q * p * page_size for q, p in zip(num_queries, num_pages, strict=True))
        if num_bits > MAX_MASK_BITS:
            raise ValueError(
                f"a micro-batch of {num_rows} rows of {num_tokens} tokens has a mask of {num_bits} bits; "
                f"FlashInfer takes up to {MAX_MASK_BITS}: use fewer rows"
            )
        row, _, page = pages.nonzero(as_tuple=True)
        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "NHD", backend="fa2"
        )
        wrapper.plan(
            _offsets(num_queries),
            _offsets(num_pages),
            (row * (num_tokens // page_size) + page).to(torch.int32),
            torch.full((len(num_pages),), page_size, dtype=torch.int32),
            num_heads,
            num_kv_heads,
            head_dim,
            page_size,
            custom_mask=paged_mask(layout, pages, page_size=page_size),
            sm_scale=scaling,
            q_data_type=dtype,
            kv_data_type=dtype,
            disable_split_kv=True,
        )
        return cls(
            wrapper=wrapper,
            page_size=page_size,
            scaling=scaling,
            backward=BackwardPlan.make(layout, tiles=default_tiles(head_dim, dtype)),
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
        if scaling != self.scaling:
            raise ValueError(f"the plan was made for scaling {self.scaling}, the model's is {scaling}")
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
        assert scaling == self.scaling, f"planned for {self.scaling}, got {scaling}"
        key, value = (x.view(-1, self.page_size, *x.shape[2:]) for x in (key, value))
        out, lse = self.wrapper.run(query.flatten(0, 1), (key, value), return_lse=True)
        return out.view_as(query), lse.view(query.shape[:3]).transpose(1, 2).contiguous()


def visible_pages(layout: PackedLayout, *, page_size: int) -> torch.Tensor:
    """`[N, T, P]` bool: the pages of a row that some query of a tile may see; P = W / page_size."""
    return QueryTiles.of(layout, QUERY_TILE).visible(page_size)


def paged_mask(layout: PackedLayout, pages: torch.Tensor, *, page_size: int) -> torch.Tensor:
    """The requests' masks `[queries, listed keys]`, flattened and joined, as FlashInfer wants them.

    Args:
        pages: `[N, T, P]` bool, which pages each tile of queries lists.
    """
    num_tokens = layout.num_window
    key = torch.arange(num_tokens, device=pages.device)
    joined = []
    for ctx, lo, hi, listed in zip(layout.ctx, layout.lo, layout.hi, pages, strict=True):
        sees = visible(ctx[:, None], lo[:, None], hi[:, None], key)  # [W, W]
        per_query = listed.repeat_interleave(QUERY_TILE, dim=0)[:num_tokens]  # [W, P]
        # Row-major order is that of the requests: by tile, query in it, page, key in it.
        joined.append(sees[per_query.repeat_interleave(page_size, dim=1)])
    return torch.cat(joined)


def _offsets(lengths: list[int]) -> torch.Tensor:
    """Where each part of a joined sequence starts, and its end: int32 on the host."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
