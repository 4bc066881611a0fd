"""What SGLang carries between rounds for a D3D batch: the last committed token of every row.

Everything else a round needs lives in tensors indexed by request row, since under the overlap scheduler extra
fields here are not relayed across filter and merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType


@dataclass
class D3DDraftInput(SpecInput):
    """Round-to-round input. `bonus_tokens` `[N]` are the anchors of the next round."""

    bonus_tokens: torch.Tensor | None
    new_seq_lens: torch.Tensor
    future_indices: torch.Tensor | None = None  # assigned by the scheduler
    # Read by the scheduler's relay, unused here.
    topk_p: torch.Tensor | None = None
    topk_index: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None

    def __post_init__(self) -> None:
        super().__init__(spec_input_type=SpecInputType.DFLASH_DRAFT)
        self.num_tokens_per_req = 1
        self.num_tokens_for_logprob_per_req = 1

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: torch.Tensor | None = None) -> None:
        """Keep the rows at `new_indices`."""
        if self.future_indices is not None:
            # Overlap: the scheduler refills the tokens from its relay, the indices are all that counts.
            self.future_indices = self.future_indices[new_indices]
            return
        assert self.bonus_tokens is not None
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, other: D3DDraftInput) -> None:
        """Append the rows of `other`."""
        if self.future_indices is not None:
            assert other.future_indices is not None
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        assert self.bonus_tokens is not None and other.bonus_tokens is not None
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        self.new_seq_lens = torch.cat([self.new_seq_lens, other.new_seq_lens])


def verify_input(
    *, block: torch.Tensor | None, positions: torch.Tensor | None, block_size: int
) -> DFlashVerifyInput:
    """Verify input of a chain of `block_size` tokens per row: plain causal attention, no mask to build.

    `block` and `positions` are flat `[N * B]`; both are None while graphs are captured.
    """
    return DFlashVerifyInput(
        draft_token=block,
        positions=positions,
        draft_token_num=block_size,
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
