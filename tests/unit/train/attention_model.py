"""A whole packed model against the same model given one block at a time."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.train.attention_cases import Packing, Row
from train.attention import AttentionName, implementation, make_plan, register

BLOCK_SIZE = 4
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
# fp32, two layers: sums in another order. Relative to the largest value.
TOLERANCE = 2e-5
PACKING = Packing(
    # Neighbouring and repeated anchors, an anchor near the end, dead blocks and padding.
    rows=(Row(num_real=14, contexts=(3, 4, 4, 9, 13)), Row(num_real=7, contexts=(2, 6))),
    context_len=16,
    num_blocks=5,
    block_size=BLOCK_SIZE,
)


def assert_packed_equals_blocks(name: AttentionName, *, checkpointing: bool, device: str = "cpu") -> None:
    """Logits of every live token and gradients of every weight, in training mode."""
    register()
    packed, separate = _model(implementation(name)).to(device), _model("sdpa")
    if checkpointing:
        packed.gradient_checkpointing_enable()
    generator = torch.Generator().manual_seed(1)
    num_rows, num_tokens = len(PACKING.rows), PACKING.num_tokens
    token_ids = torch.randint(32, (num_rows, num_tokens), generator=generator)
    weights = torch.randn(num_rows, num_tokens, 32, generator=generator)
    layout = PACKING.layout(device)
    plan = make_plan(
        name,
        layout,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
    )
    logits = packed(
        input_ids=token_ids.to(device), position_ids=layout.position_ids, attention_plan=plan, use_cache=False
    ).logits.cpu()
    expected, live = _separate_logits(separate, token_ids)
    _assert_close(logits[live], expected[live])
    (logits * weights)[live].sum().backward()
    (expected * weights)[live].sum().backward()
    for (weight_name, weight), other in zip(packed.named_parameters(), separate.parameters(), strict=True):
        assert weight.grad is not None and other.grad is not None, weight_name
        _assert_close(weight.grad.cpu(), other.grad)


def _model(attention: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=attention,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).train()


def _separate_logits(model: LlamaForCausalLM, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same logits from an ordinary causal pass and one pass for each block; which tokens are live."""
    live = torch.zeros(token_ids.shape, dtype=torch.bool)
    rows = []
    for n, row in enumerate(PACKING.rows):
        context = token_ids[n, : row.num_real]
        # Dead tokens have no logits to compare.
        logits = [
            model(input_ids=context[None]).logits[0],
            torch.zeros(PACKING.context_len - row.num_real, 32),
        ]
        live[n, : row.num_real] = True
        for block in range(PACKING.num_blocks):
            first = PACKING.context_len + block * BLOCK_SIZE
            if block >= len(row.contexts):
                logits.append(torch.zeros(BLOCK_SIZE, 32))
                continue
            live[n, first : first + BLOCK_SIZE] = True
            before = context[: row.contexts[block]]
            alone = torch.cat([before, token_ids[n, first : first + BLOCK_SIZE]])
            mask = torch.ones(len(alone), len(alone), dtype=torch.bool).tril()
            mask[len(before) :] = True  # a block is read in both directions
            logits.append(
                model(input_ids=alone[None], attention_mask=mask[None, None]).logits[0, len(before) :]
            )
        rows.append(torch.cat(logits))
    return torch.stack(rows), live


def _assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE, f"relative error {error}"
