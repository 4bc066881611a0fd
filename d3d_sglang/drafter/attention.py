"""Attention of a drafter pass: a cached prefix and a window of new tokens, under the one visibility rule.

The function is registered with transformers under ATTENTION_NAME, so a drafter stays an ordinary Hugging Face
model; the plan of the pass travels as a forward keyword argument. This is the eager version on SDPA, right on
every device.

Legend: N rows, W window tokens, P prefix columns, H query heads, G K/V heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from d3d_sglang.drafter.kv_cache import PagedCache
from d3d_sglang.layout import PackedLayout
from d3d_sglang.masks import dense_mask

ATTENTION_NAME = "d3d_window"


@dataclass(frozen=True)
class WindowPlan:
    """Everything the layers of one pass share: made once a pass, read by every layer."""

    cache: PagedCache
    prefix_slots: torch.Tensor  # [N, P]
    known_slots: torch.Tensor  # [N, num_known]
    mask: torch.Tensor  # [N, 1, W, P + W]

    @classmethod
    def make(
        cls, cache: PagedCache, rows: torch.Tensor, *, layout: PackedLayout, max_prefix: int
    ) -> WindowPlan:
        """Plan a pass over `rows` `[N]`; `max_prefix` is a host-side bound on every row's prefix length."""
        cached = torch.arange(max_prefix, device=rows.device).expand(rows.shape[0], -1)
        return cls(
            cache=cache,
            prefix_slots=cache.slots(rows, cached),
            known_slots=cache.slots(rows, layout.position_ids[:, : layout.num_known]),
            mask=dense_mask(layout, max_prefix=max_prefix)[:, None],
        )


def window_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [N, H, W, D]
    key: torch.Tensor,  # [N, G, W, D]
    value: torch.Tensor,  # [N, G, W, D]
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    window_plan: WindowPlan,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to cached prefix and window; the known tokens' K/V enter the cache. Returns `[N, W, H, D]`."""
    assert attention_mask is None, "the plan carries the mask"
    layer, plan = int(module.layer_idx), window_plan  # type: ignore[arg-type]
    past_k, past_v = plan.cache.read(layer, plan.prefix_slots)  # [N, P, G, D]
    k = torch.cat([past_k.transpose(1, 2), key], dim=2)  # [N, G, P + W, D]
    v = torch.cat([past_v.transpose(1, 2), value], dim=2)
    out = scaled_dot_product_attention(query, k, v, attn_mask=plan.mask, scale=scaling, enable_gqa=True)
    num_known = plan.known_slots.shape[1]
    known_k, known_v = (x[:, :, :num_known].transpose(1, 2) for x in (key, value))  # [N, num_known, G, D]
    plan.cache.write(layer, plan.known_slots, k=known_k, v=known_v)
    return out.transpose(1, 2), None


def register() -> None:
    """Make the attention known to transformers; safe to call again."""
    AttentionInterface.register(ATTENTION_NAME, window_attention)
