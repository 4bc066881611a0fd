"""How many floating-point operations a training step needs: the numerator of MFU.

Counts what the method asks for and nothing an implementation adds: linear layers on tokens that are no
padding, the output head where something is predicted, attention on visible pairs. Neither recomputation nor
masked tiles nor the embedding look-up, norms and activations count. The caller divides by time and the
device's peak.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from train.packing import PackedBatch

FORWARD_AND_BACKWARD = 3  # the backward pass takes two products for each of the forward pass


def training_flops(config: PretrainedConfig, batch: PackedBatch) -> int:
    """Operations of one forward and backward pass over a batch; a multiply-add is two."""
    return FORWARD_AND_BACKWARD * forward_flops(
        config,
        num_tokens=batch.num_tokens,
        num_pairs=batch.num_pairs,
        num_predictions=len(batch.diff.labels) + len(batch.ar.labels),
    )


def forward_flops(config: PretrainedConfig, *, num_tokens: int, num_pairs: int, num_predictions: int) -> int:
    """Operations of one forward pass of a dense Llama-like network.

    Args:
        num_tokens: tokens that are no padding.
        num_pairs: (query, visible key) pairs of those tokens.
        num_predictions: positions whose logits are needed.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    query_and_output = 2 * hidden * heads * head_dim
    key_and_value = 2 * hidden * config.num_key_value_heads * head_dim
    mlp = 3 * hidden * config.intermediate_size  # gate, up, down
    layer = num_tokens * (query_and_output + key_and_value + mlp) + num_pairs * 2 * heads * head_dim
    return 2 * (config.num_hidden_layers * layer + num_predictions * hidden * config.vocab_size)
