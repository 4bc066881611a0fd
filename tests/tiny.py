"""Tiny random models for tests: small enough that a whole test of the method takes well under a second.

Weights depend on the seed alone. Their standard deviation is far above the usual 0.02, so that greedy tokens
depend on the context and the two largest logits are rarely close.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 32
MASK_TOKEN_ID = 31
WEIGHT_STD = 0.3


def tiny_llama(
    seed: int,
    *,
    vocab_size: int = VOCAB_SIZE,
    num_layers: int = 2,
    weight_std: float = WEIGHT_STD,
    tied: bool = False,
) -> LlamaForCausalLM:
    """A random fp32 Llama on the CPU: 4 query heads over 2 K/V heads of size 8, evaluation mode."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=weight_std,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.eval().requires_grad_(False)
