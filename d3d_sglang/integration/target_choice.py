"""What the target makes of a verified block.

Logits go through the same steps as in plain decoding (custom processors, penalties, grammar mask, logit
bias), each position as if it were a decode step of its own. Then candidates are accepted: greedy rows by
comparing with the argmax, sampled rows by rejection sampling with the request's own coins.

Legend: N rows, B block size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils.async_probe import sanitize_nan_logits

from d3d_sglang.coins import ACCEPT, RESIDUAL, uniform
from d3d_sglang.integration.penalty_rows import PenaltyRows
from d3d_sglang.spec_types import DraftProposal, VerifyResult
from d3d_sglang.verify.accept import accept_block
from d3d_sglang.verify.sampling import filtered_probs, reject_sample


@dataclasses.dataclass(frozen=True)
class VerifiedBlock:
    """Input of a choice: the block and the target's logits for it."""

    logits: torch.Tensor  # [N * B, V], changed in place
    draft_tokens: torch.Tensor  # [N, B-1]
    positions: torch.Tensor  # [N * B]
    rows: torch.Tensor  # [N]
    seeds: torch.Tensor  # [N]
    committed_len: torch.Tensor  # [N]
    grammar_mask: Any  # SGLang's GrammarMask over N * B rows, or None


class TargetChoice:
    """Decides what the target accepts of a verified block."""

    def __init__(self, *, sampler: Any, penalties: PenaltyRows, block_size: int, match: bool) -> None:
        self._match = match  # drafts of sampled rows are drawn, not the most likely tokens
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

    def accept(
        self, block: VerifiedBlock, proposal: DraftProposal, *, sampling: SamplingBatchInfo, keep_logits: bool
    ) -> VerifyResult:
        """What the target accepts, from adjusted logits, which are used up unless `keep_logits`.

        Greedy rows accept what equals the argmax. Sampled rows use rejection sampling with the probabilities
        the drafts were drawn from; for point-mass drafts that is one draw per position and a comparison.
        """
        if sampling.is_all_greedy:
            target_tokens = block.logits.argmax(dim=-1).view(-1, self._block_size)
            return accept_block(proposal.tokens, proposal.prop_len, target_tokens)
        logits = block.logits.clone() if keep_logits else block.logits
        if not self._match:
            return accept_block(proposal.tokens, proposal.prop_len, self._sample(logits, block, sampling))
        sanitize_nan_logits(logits, "D3D: verified logits")
        by_row = logits.view(-1, self._block_size, logits.shape[-1])  # [N, B, V]
        probs = filtered_probs(
            by_row,
            temperatures=sampling.temperatures,
            # What no row uses is left out; greedy rows are rows of top_k 1.
            top_ks=sampling.top_ks if sampling.need_top_k_sampling else None,
            top_ps=sampling.top_ps if sampling.need_top_p_sampling else None,
            min_ps=sampling.min_ps if sampling.need_min_p_sampling else None,
        )
        positions = block.positions.view(-1, self._block_size)  # [N, B]
        return reject_sample(
            proposal,
            probs,
            # A coin belongs to the position of the candidate it decides on: it is used once, in the round
            # that reaches that position.
            accept_coins=uniform(block.seeds, positions[:, 1:], stream=ACCEPT),
            # One a round; no two rounds of a request start at the same length.
            final_coins=uniform(block.seeds, block.committed_len, stream=RESIDUAL),
        )

    def _sample(
        self, logits: torch.Tensor, block: VerifiedBlock, sampling: SamplingBatchInfo
    ) -> torch.Tensor:
        """One draw of the target at every position, `[N, B]`, by SGLang's own sampler."""
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
