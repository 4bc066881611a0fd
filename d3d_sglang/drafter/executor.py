"""Runs drafter passes: prepare the inputs, plan the attention, forward.

Owns the network and the K/V cache, on any device. Which tokens a row has, and whether its draft may be used,
is the business of `rows.py`. All lengths that shape a pass on the host are upper bounds handed in by the
caller, so nothing here waits for a device.

Legend: N rows, W window tokens, B block size, R blocks a row, K support size, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from d3d_sglang.coins import DRAFT, uniform
from d3d_sglang.drafter.attention import WindowPlan
from d3d_sglang.drafter.kv_cache import PagedCache
from d3d_sglang.drafter.model import DrafterModel
from d3d_sglang.layout import PackedLayout, blocks_layout, prefill_layout
from d3d_sglang.spec_types import BlockDrafts

PREFILL_CHUNK = 512  # tokens a prefill pass takes at once: bounds the dense mask to 512 x length


@dataclass(frozen=True)
class DraftInputs:
    """Inputs of one pass."""

    token_ids: torch.Tensor  # [N, W]
    layout: PackedLayout


@dataclass(frozen=True)
class DraftSampling:
    """How the rows of a pass draw their tokens; greedy rows take the most likely one.

    Attributes:
        temperature: `[N]` fp32; greedy: `[N]` bool; seeds: `[N]` int64.
    """

    temperature: torch.Tensor
    greedy: torch.Tensor
    seeds: torch.Tensor


@dataclass(frozen=True)
class BlockRequest:
    """Blocks to draft.

    Attributes:
        rows: `[N]` cache rows; prefix_len: `[N]` tokens they have in the cache.
        known: `[N, num_known]` tokens after the prefix, read causally and cached; num_known may be 0.
        anchors: `[N, R]` first tokens of the blocks; context_len: `[N, R]` tokens each of them sees.
        max_prefix: host-side upper bound on `prefix_len`.
    """

    rows: torch.Tensor
    prefix_len: torch.Tensor
    known: torch.Tensor
    anchors: torch.Tensor
    context_len: torch.Tensor
    max_prefix: int


class DrafterExecutor:
    """Prefills and drafts for rows of a cache; `support` is K."""

    def __init__(
        self, model: DrafterModel, cache: PagedCache, *, block_size: int, mask_token_id: int, support: int
    ) -> None:
        self.model = model
        self.cache = cache
        self.block_size = block_size
        self.support = support
        self._mask_token_id = mask_token_id

    def prepare(self, request: BlockRequest) -> DraftInputs:
        """Known tokens, then `[anchor, M x (B-1)]` for every block."""
        num_rows, num_blocks = request.anchors.shape
        blocks = request.anchors.new_full((num_rows, num_blocks, self.block_size), self._mask_token_id)
        blocks[:, :, 0] = request.anchors
        layout = blocks_layout(
            prefix_len=request.prefix_len,
            num_known=request.known.shape[1],
            context_len=request.context_len,
            block_size=self.block_size,
        )
        return DraftInputs(token_ids=torch.cat([request.known, blocks.flatten(1)], dim=1), layout=layout)

    def plan(self, rows: torch.Tensor, layout: PackedLayout, *, max_prefix: int) -> WindowPlan:
        """Attention plan of one pass, shared by all layers."""
        return WindowPlan.make(self.cache, rows, layout=layout, max_prefix=max_prefix)

    def forward(self, inputs: DraftInputs, plan: WindowPlan) -> torch.Tensor:
        """Hidden states `[N, W, E]`; the known tokens' K/V are in the cache afterwards."""
        return self.model.hidden(inputs.token_ids, position_ids=inputs.layout.position_ids, plan=plan)

    @torch.inference_mode()
    def draft(self, request: BlockRequest, sampling: DraftSampling | None) -> BlockDrafts:
        """Draft all blocks in one pass (paper, section 3.4). Without `sampling` every row is greedy."""
        inputs = self.prepare(request)
        hidden = self.forward(inputs, self.plan(request.rows, inputs.layout, max_prefix=request.max_prefix))
        blocks = hidden[:, request.known.shape[1] :].unflatten(1, (-1, self.block_size))  # [N, R, B, E]
        top = self.model.logits(blocks[:, :, 1:]).topk(self.support, dim=-1)  # [N, R, B-1, K]
        if sampling is None:
            probs = torch.zeros_like(top.values, dtype=torch.float32)
            probs[..., 0] = 1.0
            return BlockDrafts(tokens=top.indices[..., 0], support_ids=top.indices, support_probs=probs)
        probs, chosen = self._draw(top.values.float(), request.context_len, sampling)
        tokens = top.indices.gather(-1, chosen[..., None]).squeeze(-1)
        return BlockDrafts(tokens=tokens, support_ids=top.indices, support_probs=probs)

    def _draw(
        self, logits: torch.Tensor, context_len: torch.Tensor, sampling: DraftSampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities `[N, R, B-1, K]` over the support, and one draw of each position `[N, R, B-1]`.

        The coin of a position depends on the request's seed and the position alone: a position is drawn anew
        only while its token is still unverified, and no verification looks at a token it does not reach.
        """
        shape = (-1, 1, 1, 1)
        probs = (logits / sampling.temperature.view(shape)).softmax(dim=-1)
        point = torch.zeros_like(probs)
        point[..., 0] = 1.0
        probs = torch.where(sampling.greedy.view(shape), point, probs)
        positions = context_len[:, :, None] + torch.arange(1, self.block_size, device=logits.device)
        coins = uniform(sampling.seeds, positions.flatten(1), stream=DRAFT).view_as(positions)
        below = probs.cumsum(dim=-1) <= coins[..., None]
        # Rounding can leave the sum below the coin: the last token that has any mass then.
        last = (probs > 0).sum(dim=-1) - 1
        return probs, torch.minimum(below.sum(dim=-1), last)

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
