"""What the target would output at every position of a verified block.

Logits go through the same steps as in plain decoding (custom processors, penalties, grammar mask, logit
bias, then SGLang's own sampler), each position as if it were a decode step of its own. For greedy rows the
result is the argmax; for sampled rows one draw per position, seeded by request and position where the server
is deterministic. Acceptance then needs nothing but comparing tokens.

Legend: N rows, B block size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from d3d_sglang.integration.penalty_rows import PenaltyRows


@dataclasses.dataclass(frozen=True)
class VerifiedBlock:
    """Input of a choice: the block and the target's logits for it."""

    logits: torch.Tensor  # [N * B, V], changed in place
    draft_tokens: torch.Tensor  # [N, B-1]
    positions: torch.Tensor  # [N * B]
    rows: torch.Tensor  # [N]
    committed_len: torch.Tensor  # [N]
    grammar_mask: Any  # SGLang's GrammarMask over N * B rows, or None


class TargetChoice:
    """Chooses target tokens for verified blocks with the target's own sampler."""

    def __init__(self, *, sampler: Any, penalties: PenaltyRows, block_size: int) -> None:
        self._sampler = sampler
        self._penalties = penalties
        self._block_size = block_size

    def adjust(self, block: VerifiedBlock, sampling: SamplingBatchInfo, *, rows_cpu: list[int]) -> None:
        """Change the logits as plain decoding does, in its order."""
        num_tokens = self._block_size
        if sampling.has_custom_logit_processor:
            apply_custom_logit_processor(block.logits, sampling, num_tokens_in_batch=num_tokens)
        by_row = block.logits.view(-1, num_tokens, block.logits.shape[-1])  # [N, B, V]
        if sampling.acc_additive_penalties is not None:
            self._penalties.apply(
                by_row,
                block.rows,
                rows_cpu=rows_cpu,
                draft_tokens=block.draft_tokens,
                committed_len=block.committed_len,
            )
        if block.grammar_mask is not None:
            block.grammar_mask.apply(block.logits)
        if sampling.logit_bias is not None:
            by_row.add_(sampling.logit_bias[:, None])

    def choose(self, block: VerifiedBlock, sampling: SamplingBatchInfo, *, keep_logits: bool) -> torch.Tensor:
        """Target tokens `[N, B]` from adjusted logits, which are used up unless `keep_logits`."""
        if sampling.is_all_greedy:
            return block.logits.argmax(dim=-1).view(-1, self._block_size)
        logits = block.logits.clone() if keep_logits else block.logits
        tokens: torch.Tensor = self._sampler(
            LogitsProcessorOutput(next_token_logits=logits),
            _repeat_rows(sampling, self._block_size),
            return_logprob=False,
            top_logprobs_nums=[],
            token_ids_logprobs=[],
            positions=block.positions,
        )
        return tokens.view(-1, self._block_size).long()


def _repeat_rows(sampling: SamplingBatchInfo, times: int) -> SamplingBatchInfo:
    """Sampling parameters with every row repeated `times` times, nothing left to adjust logits with."""
    per_row = {
        name: None
        if getattr(sampling, name) is None
        else getattr(sampling, name).repeat_interleave(times, dim=0)
        for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
    }
    return dataclasses.replace(
        sampling,
        **per_row,
        logit_bias=None,
        has_custom_logit_processor=False,
        sampling_mask_batch_indices=None,
    )
