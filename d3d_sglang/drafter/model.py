"""The drafter's network: the transformers module of an ordinary causal LM with its attention swapped.

Owns loading and the two calls serving needs: hidden states of a window, and logits of chosen positions with
the mask token ruled out. Knows nothing of rows, caches or SGLang.

Legend: N rows, W window tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from d3d_sglang.drafter import attention
from d3d_sglang.drafter.attention import WindowPlan


class DrafterModel:
    """A drafter on one device, evaluation only.

    Args:
        path: drafter folder, already checked by `checkpoint.read_drafter`.
        mask_token_id: the reserved id; its logit is -inf.
        vocab_size: tokens at or past this id (padding rows of the embedding) are never drafted.
    """

    def __init__(
        self, path: Path, *, mask_token_id: int, vocab_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        attention.register()
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention.ATTENTION_NAME
        )
        model = model.eval().requires_grad_(False).to(device)
        self.config = model.config
        self.device = device
        self.dtype = dtype
        self._body = model.get_decoder()
        self._head = model.get_output_embeddings()
        forbidden = torch.zeros(self._head.weight.shape[0], dtype=torch.bool, device=device)
        forbidden[mask_token_id] = True
        forbidden[vocab_size:] = True
        self._forbidden = forbidden  # [V]
        self._max_token_id = forbidden.shape[0] - 1

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def num_kv_heads(self) -> int:
        return int(self.config.num_key_value_heads)

    @property
    def head_dim(self) -> int:
        explicit = getattr(self.config, "head_dim", None)
        return int(explicit or self.config.hidden_size // self.config.num_attention_heads)

    def hidden(
        self, token_ids: torch.Tensor, *, position_ids: torch.Tensor, plan: WindowPlan
    ) -> torch.Tensor:
        """Hidden states `[N, W, E]` of a window of `token_ids` `[N, W]`."""
        # No cache, no mask function: transformers then builds neither of its own.
        # A target with more padding rows than the drafter may emit ids the drafter has no row for.
        token_ids = token_ids.clamp(max=self._max_token_id)
        output = self._body(input_ids=token_ids, position_ids=position_ids, use_cache=False, window_plan=plan)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[..., V]` of hidden states `[..., E]`; -inf for the mask token and for padding ids."""
        logits: torch.Tensor = self._head(hidden)
        return logits.masked_fill_(self._forbidden, float("-inf"))
