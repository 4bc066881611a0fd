"""The packed model against blocks run one by one: losses, gradients, drafts; loading."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests import tiny_folders
from tests.tiny import MASK_TOKEN_ID, VOCAB_SIZE, tiny_llama
from tests.unit.train.separate_blocks import ar_loss, block_logits, diff_loss, exact_llama, example_of, sample
from train.dataset import Example
from train.model import TrainModel, load_lm
from train.packing import PackedBatch, pack

GAMMA = 2.0
# float64, norms included; rotary tables are fp32 on both sides, from the same positions. What is left is the
# order of sums, and weights stored in fp32 (6e-8 each).
LOSS_RTOL = 2e-7
GRADIENT_OF_LARGEST = 2e-7
# fp32 throughout, logits of about 6.
FP32_RTOL = 1e-5
# bf16 weights and activations, 8 bits each. Seen on a CPU: 1e-3.
BF16_RTOL = 1e-2

CASES = {
    "several rows": ([(5, 9), (3, 12), (8, 4)], 4, 3),
    "answers shorter than a block": ([(4, 3), (2, 5)], 8, 4),
    "two tokens": ([(6, 2)], 4, 1),
    "more blocks than anchors": ([(3, 4), (2, 9)], 3, 10),
    "one block": ([(2, 8)], 5, 1),
    "one prompt token": ([(1, 7)], 2, 4),
}


def packed(examples: list[Example], **changes: Any) -> PackedBatch:
    arguments: dict[str, Any] = {"gamma": GAMMA, "mask_token_id": MASK_TOKEN_ID, "multiple_of": 4}
    arguments["generator"] = np.random.default_rng(0)
    return pack(examples, **arguments | changes)


def train_model(lm: PreTrainedModel, **changes: Any) -> TrainModel:
    arguments: dict[str, Any] = {"mask_token_id": MASK_TOKEN_ID, "attention": "sdpa"}
    return TrainModel(lm, **arguments | changes)


def anchors_of(batch: PackedBatch, row: int, example: Example) -> list[int]:
    """The 1-based anchors of a row, from the positions its blocks have."""
    first = batch.layout.ctx[row, batch.layout.num_known :: batch.block_size]
    return [int(at) - len(example.prompt_ids) + 1 for at in first if at > 0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ar_weight", [1.0, 0.3])
def test_losses_and_gradients_are_those_of_separate_blocks(case: str, ar_weight: float) -> None:
    lengths, block_size, num_anchors = CASES[case]
    examples = [sample(*length, seed=i) for i, length in enumerate(lengths)]
    batch = packed(examples, block_size=block_size, num_anchors=num_anchors)
    model = train_model(exact_llama(1), ar_weight=ar_weight, head_chunk=5)
    losses = model(batch)
    losses.total.backward()

    slow = exact_llama(1)
    diff = torch.stack(
        [
            diff_loss(slow, example, anchors_of(batch, row, example), block_size=block_size, gamma=GAMMA)
            for row, example in enumerate(examples)
        ]
    ).mean()
    ar = torch.stack([ar_loss(slow, example) for example in examples]).mean()
    total = diff + ar_weight * ar
    total.backward()

    assert losses.total.item() == pytest.approx(total.item(), rel=LOSS_RTOL)
    assert losses.diff.item() == pytest.approx(diff.item(), rel=LOSS_RTOL)
    assert losses.ar.item() == pytest.approx(ar.item(), rel=LOSS_RTOL)
    expected = dict(slow.named_parameters())
    for name, parameter in model.lm.named_parameters():
        largest = expected[name].grad.abs().max()
        assert (parameter.grad - expected[name].grad).abs().max() < GRADIENT_OF_LARGEST * largest, name


def test_a_tied_head_gets_both_gradients() -> None:
    example = sample(4, 6)
    batch = packed([example], block_size=3, num_anchors=2)
    model, slow = train_model(exact_llama(2, tied=True)), exact_llama(2, tied=True)
    assert model.lm.get_output_embeddings().weight is model.lm.get_input_embeddings().weight
    model(batch).total.backward()
    anchors = anchors_of(batch, 0, example)
    (diff_loss(slow, example, anchors, block_size=3, gamma=GAMMA) + ar_loss(slow, example)).backward()
    expected = slow.get_input_embeddings().weight.grad
    error = (model.lm.get_input_embeddings().weight.grad - expected).abs().max()
    assert error < GRADIENT_OF_LARGEST * expected.abs().max()


def test_fp32_losses_stay_close() -> None:
    examples = [sample(5, 9), sample(3, 12, seed=1)]
    batch = packed(examples, block_size=4, num_anchors=3)
    single, exact = (train_model(lm)(batch) for lm in (tiny_llama(1), exact_llama(1)))
    assert single.total.dtype == torch.float32
    for name in ("total", "diff", "ar"):
        assert getattr(single, name).item() == pytest.approx(getattr(exact, name).item(), rel=FP32_RTOL)


@pytest.mark.gpu
@pytest.mark.parametrize("compile_loss", [False, True])
def test_bf16_losses_on_a_gpu_stay_close(compile_loss: bool) -> None:
    batch = packed([sample(5, 9), sample(3, 12, seed=1)], block_size=4, num_anchors=3)
    exact = train_model(exact_llama(1))(batch)
    lm = tiny_llama(1).to("cuda", torch.bfloat16).requires_grad_(True)
    model = train_model(lm, compile_loss=compile_loss, head_chunk=16)
    losses = model(batch.pin_memory().to("cuda", non_blocking=True))
    losses.total.backward()
    assert losses.total.dtype == torch.float32
    for name in ("total", "diff", "ar"):
        assert getattr(losses, name).item() == pytest.approx(getattr(exact, name).item(), rel=BF16_RTOL)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_padding_changes_nothing() -> None:
    """Another row length, more padding columns and dead blocks, another token in them."""
    example = sample(5, 6)
    batch = packed([example], block_size=4, num_anchors=5, multiple_of=1)
    wide = packed([example], block_size=4, num_anchors=8, multiple_of=64)
    model = train_model(exact_llama(3))
    expected = model(batch)
    padding = (wide.layout.position_ids == 0) & (torch.arange(wide.layout.num_window) > 0)
    assert padding.sum() > 60
    for tokens in (wide.token_ids, wide.token_ids.masked_fill(padding, 7)):
        losses = model(dataclasses.replace(wide, token_ids=tokens))
        assert losses.total.item() == pytest.approx(expected.total.item(), rel=LOSS_RTOL)


@pytest.mark.parametrize("chunk", [1, 13, 10_000])
def test_chunks_change_nothing(chunk: int) -> None:
    batch = packed([sample(5, 9), sample(3, 12, seed=1)], block_size=4, num_anchors=3)
    whole = train_model(exact_llama(1))
    parts = train_model(exact_llama(1), head_chunk=chunk)
    for model in (whole, parts):
        model(batch).total.backward()
    for (name, a), (_, b) in zip(whole.named_parameters(), parts.named_parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() <= GRADIENT_OF_LARGEST * a.grad.abs().max(), name
    assert torch.equal(whole.drafts(batch, top=3), parts.drafts(batch, top=3))


def test_recomputed_layers_change_nothing() -> None:
    batch = packed([sample(5, 9), sample(3, 12, seed=1)], block_size=4, num_anchors=3)
    plain, recomputed = (train_model(exact_llama(1)).train() for _ in range(2))
    recomputed.lm.gradient_checkpointing_enable({"use_reentrant": False})
    for model in (plain, recomputed):
        model(batch).total.backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), recomputed.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_without_ar_weight_only_the_blocks_are_learned() -> None:
    batch = packed([sample(5, 9)], block_size=4, num_anchors=3)
    model = train_model(exact_llama(1), ar_weight=0.0)
    losses = model(batch)
    assert losses.total.item() == pytest.approx(losses.diff.item(), rel=LOSS_RTOL)
    assert losses.ar.item() > 0


def test_drafts_are_the_most_likely_tokens_of_separate_blocks() -> None:
    examples = [sample(5, 9), sample(3, 12, seed=1)]
    batch = packed(examples, block_size=4, num_anchors=3)
    lm = exact_llama(1)
    with torch.no_grad():
        lm.lm_head.weight[MASK_TOKEN_ID] *= 5  # the mask token would often be the most likely one
    drafts = train_model(lm).drafts(batch, top=4)
    assert drafts.shape == (2, 3, 3, 4) and not drafts.requires_grad
    assert not (drafts == MASK_TOKEN_ID).any()
    slow = exact_llama(1)
    for row, example in enumerate(examples):
        for block, anchor in enumerate(anchors_of(batch, row, example)):
            expected = block_logits(slow, example, anchor, block_size=4)[1:].topk(4).indices
            assert torch.equal(drafts[row, block], expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": VOCAB_SIZE}, f"it must be from 0 to {VOCAB_SIZE - 1}"),
        ({"mask_token_id": -1}, "mask_token_id is -1"),
        ({"ar_weight": -0.1}, r"ar_weight is -0\.1"),
        ({"ar_weight": math.nan}, "ar_weight is nan"),
        ({"head_chunk": 0}, "head_chunk is 0"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_model(tiny_llama(0), **changes)


# Loading and exporting


def test_loads_trains_and_exports(tmp_path: Path) -> None:
    tiny_folders.write_drafter(tmp_path / "drafter")
    lm = load_lm(tmp_path / "drafter", dtype=torch.float32, attention="sdpa")
    names = list(lm.state_dict())
    model = train_model(lm, mask_token_id=tiny_folders.RESERVED_IDS[1])
    example = example_of([7, 8], [9, 10, 11, 2])
    batch = packed([example], block_size=4, num_anchors=2, mask_token_id=tiny_folders.RESERVED_IDS[1])
    model(batch).total.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    model.lm.save_pretrained(tmp_path / "out")
    again = load_lm(tmp_path / "out", dtype=torch.float32, attention="sdpa")
    assert list(again.state_dict()) == names
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.lm.state_dict()[name]), name


def test_random_weights_follow_the_seed(tmp_path: Path) -> None:
    tiny_folders.write_drafter(tmp_path)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, same, other = (
        load_lm(tmp_path, dtype=torch.bfloat16, attention="sdpa", random_init=True, seed=seed)
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.dtype == torch.bfloat16
    weights = [lm.get_decoder().layers[0].mlp.up_proj.weight for lm in (first, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_rotary_frequencies_that_follow_the_length_are_refused(tmp_path: Path) -> None:
    tiny_folders.write_drafter(tmp_path)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    tiny_folders.edit_json(tmp_path / "config.json", rope_parameters=rope)
    with pytest.raises(ValueError, match="rope_type is 'dynamic'"):
        load_lm(tmp_path, dtype=torch.float32, attention="sdpa")
