"""Runs drafter passes: prepare the inputs, plan the attention, forward.

Owns the network and the K/V cache, on any device. Which tokens a row has, and whether its draft may be used,
is the business of `rows.py`. All lengths that shape a pass on the host are upper bounds handed in by the
caller, so nothing here waits for a device.

Legend: N rows, W window tokens, B block size, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from d3d_sglang.drafter.attention import WindowPlan
from d3d_sglang.drafter.kv_cache import RowCache
from d3d_sglang.drafter.model import DrafterModel
from d3d_sglang.layout import PackedLayout, prefill_layout, sync_layout

PREFILL_CHUNK = 512  # tokens a prefill pass takes at once: bounds the dense mask to 512 x length


@dataclass(frozen=True)
class DraftInputs:
    """Inputs of one pass."""

    token_ids: torch.Tensor  # [N, W]
    layout: PackedLayout


class DrafterExecutor:
    """Prefill and synchronous drafts for rows of a cache."""

    def __init__(self, model: DrafterModel, cache: RowCache, *, block_size: int, mask_token_id: int) -> None:
        self.model = model
        self.cache = cache
        self.block_size = block_size
        self._masks = torch.full((1, block_size - 1), mask_token_id, device=model.device)

    def prepare(
        self, block: torch.Tensor, *, known_len: torch.Tensor, prefix_len: torch.Tensor, anchor: torch.Tensor
    ) -> DraftInputs:
        """Inputs of a synchronous draft: the block verified last `[N, B]`, then `[anchor, M x (B-1)]`."""
        masks = self._masks.expand(anchor.shape[0], -1)
        token_ids = torch.cat([block, anchor[:, None], masks], dim=1)  # [N, 2B]
        layout = sync_layout(prefix_len=prefix_len, known_len=known_len, block_size=self.block_size)
        return DraftInputs(token_ids=token_ids, layout=layout)

    def plan(self, rows: torch.Tensor, layout: PackedLayout, *, max_prefix: int) -> WindowPlan:
        """Attention plan of one pass, shared by all layers."""
        return WindowPlan.make(self.cache, rows, layout=layout, max_prefix=max_prefix)

    def forward(self, inputs: DraftInputs, plan: WindowPlan) -> torch.Tensor:
        """Hidden states `[N, W, E]`; the known tokens' K/V are in the cache afterwards."""
        return self.model.hidden(inputs.token_ids, position_ids=inputs.layout.position_ids, plan=plan)

    @torch.inference_mode()
    def draft(
        self,
        rows: torch.Tensor,  # [N]
        block: torch.Tensor,  # [N, B]
        *,
        known_len: torch.Tensor,  # [N]
        prefix_len: torch.Tensor,  # [N]
        anchor: torch.Tensor,  # [N]
        max_prefix: int,
    ) -> torch.Tensor:
        """Greedy candidates `[N, B-1]` after `anchor` (paper, section 3.4: one pass drafts the block)."""
        inputs = self.prepare(block, known_len=known_len, prefix_len=prefix_len, anchor=anchor)
        hidden = self.forward(inputs, self.plan(rows, inputs.layout, max_prefix=max_prefix))
        return self.model.logits(hidden[:, self.block_size + 1 :]).argmax(dim=-1)

    @torch.inference_mode()
    def prefill(self, row: int, token_ids: Sequence[int], *, start: int) -> None:
        """Write the K/V of `token_ids` at positions `start`.. of `row`; earlier positions must be there."""
        device = self.model.device
        rows = torch.tensor([row], device=device)
        for offset in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = torch.tensor([token_ids[offset : offset + PREFILL_CHUNK]], device=device)  # [1, W]
            prefix = start + offset
            layout = prefill_layout(prefix_len=prefix, num_tokens=chunk.shape[1], device=device)
            self.forward(DraftInputs(chunk, layout), self.plan(rows, layout, max_prefix=prefix))
