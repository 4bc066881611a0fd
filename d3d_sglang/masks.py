"""The one visibility rule and its rendering as a dense boolean mask.

Owns what "query sees key" means. Whoever needs a mask in another form renders it from `visible`; nobody
states the rule again. Imports `layout` only.

Legend: N rows, W window tokens, P prefix columns (an upper bound on every row's prefix length).
"""

from __future__ import annotations

import torch

from d3d_sglang.layout import PackedLayout


def visible(ctx: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """True where a query with `ctx`, `lo`, `hi` sees key index `k` of its own row; all four broadcast."""
    return (k < ctx) | ((lo <= k) & (k < hi))


def dense_mask(layout: PackedLayout, *, max_prefix: int) -> torch.Tensor:
    """Boolean mask `[N, W, P + W]` with P = `max_prefix`, True where the query may look.

    Column c < P is cached key c, False for all queries where row n has no such key (c >= prefix_len[n]);
    column P + w is window token w. `max_prefix` must be at least every row's prefix length: a smaller one
    would hide cached keys, and checking it here would wait for the device.
    """
    device = layout.prefix_len.device
    ctx, lo, hi = layout.ctx[:, :, None], layout.lo[:, :, None], layout.hi[:, :, None]  # [N, W, 1]
    prefix_len = layout.prefix_len[:, None, None]  # [N, 1, 1]
    cached = torch.arange(max_prefix, device=device)  # [P]
    window = prefix_len + torch.arange(layout.num_window, device=device)  # [N, 1, W]
    sees_cached = visible(ctx, lo, hi, cached) & (cached < prefix_len)  # [N, W, P]
    return torch.cat([sees_cached, visible(ctx, lo, hi, window)], dim=2)
