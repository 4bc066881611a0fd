"""Training losses the slow way: every block is a sequence of its own, straight from the paper's equations.

Shares nothing with the packed path but the transformers model, whose own attention runs here, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.tiny import MASK_TOKEN_ID, tiny_llama
from train.dataset import Example


def example_of(prompt_ids: Sequence[int], response_ids: Sequence[int], *, id: str = "example") -> Example:
    """An example made of these token ids."""
    return Example(id, np.array(prompt_ids, np.int32), np.array(response_ids, np.int32))


def sample(prompt_len: int, response_len: int, *, seed: int = 0) -> Example:
    """Random token ids, none of them the mask token."""
    ids = np.random.default_rng(seed).integers(MASK_TOKEN_ID, size=prompt_len + response_len, dtype=np.int32)
    return Example(f"random{seed}", ids[:prompt_len], ids[prompt_len:])


def exact_llama(seed: int, *, tied: bool = False) -> PreTrainedModel:
    """A tiny float64 Llama with gradients; transformers' RMSNorm, which rounds to fp32 inside, replaced."""
    model = tiny_llama(seed, tied=tied).double().requires_grad_(True)
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = _float64_norm(module)
    return model


def block_logits(model: PreTrainedModel, example: Example, anchor: int, *, block_size: int) -> torch.Tensor:
    """Logits `[B, V]` of the block of one anchor (1-based) behind its own context."""
    tokens = [*example.prompt_ids.tolist(), *example.response_ids[:anchor].tolist()]
    sequence = torch.tensor([[*tokens, *[MASK_TOKEN_ID] * (block_size - 1)]])
    length = sequence.shape[1]
    mask = torch.full((1, 1, length, length), float("-inf"), dtype=model.dtype).triu(1)
    mask[:, :, -block_size:] = 0.0
    logits = model(sequence, attention_mask=mask, use_cache=False).logits[0, -block_size:]
    return _without_mask_token(logits)


def diff_loss(
    model: PreTrainedModel, example: Example, anchors: Sequence[int], *, block_size: int, gamma: float
) -> torch.Tensor:
    """Equation 5 for one example."""
    weighted, normaliser = torch.zeros((), dtype=model.dtype), 0.0
    response = example.response_ids.tolist()
    for anchor in anchors:
        log_probs = block_logits(model, example, anchor, block_size=block_size).log_softmax(dim=-1)
        for j in range(1, min(block_size - 1, len(response) - anchor) + 1):
            weight = math.exp(-(j - 1) / gamma)
            weighted = weighted - weight * log_probs[j, response[anchor + j - 1]]  # r_{s+j}, 1-based
            normaliser += weight
    return weighted / normaliser


def ar_loss(model: PreTrainedModel, example: Example) -> torch.Tensor:
    """Equation 6 for one example."""
    tokens = [*example.prompt_ids.tolist(), *example.response_ids.tolist()]
    log_probs = _without_mask_token(model(torch.tensor([tokens]), use_cache=False).logits[0]).log_softmax(-1)
    prompt_len = len(example.prompt_ids)
    losses = [-log_probs[i - 1, tokens[i]] for i in range(prompt_len, len(tokens))]
    return torch.stack(losses).mean()


def _without_mask_token(logits: torch.Tensor) -> torch.Tensor:
    forbidden = torch.arange(logits.shape[-1]) == MASK_TOKEN_ID
    return logits.masked_fill(forbidden, float("-inf"))


def _float64_norm(module: torch.nn.Module):
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
        return module.weight * hidden * scale

    return forward
