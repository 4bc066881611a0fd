"""The chunked head against torch's own cross entropy and its autograd."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from train.losses import ChunkedHead, TopTokens, WeightedCrossEntropy, loss_and_gradient

MASK = 3
# float64 on both sides, sums in another order. Seen: 4e-16.
EXACT = {"rtol": 1e-12, "atol": 1e-14}
# Logits and gradients are rounded to bf16 (8 bits) once each; sums of 40 of them. Seen: 4e-3 of the largest.
BF16_OF_LARGEST = 1.5e-2


def problem(dtype: torch.dtype, *, num_positions: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, 17, (num_positions,), generator=generator)
    labels[::7] = 0
    return {
        "hidden": torch.randn(num_positions, 8, dtype=torch.float64, generator=generator).to(dtype),
        "weight": torch.randn(17, 8, dtype=torch.float64, generator=generator).to(dtype),
        "labels": labels,
        "weights": torch.rand(num_positions, generator=generator),
    }


def expected(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor):
    """Total, losses, and gradients of 0.5 * total, by autograd in float64."""
    hidden, weight = (x.double().requires_grad_(True) for x in (hidden, weight))
    logits = hidden @ weight.t()
    forbidden = torch.arange(17) == MASK
    losses = cross_entropy(logits.masked_fill(forbidden, float("-inf")), labels, reduction="none")
    total = (weights.double() * losses).sum()
    (0.5 * total).backward()
    return total.detach(), losses.detach(), hidden.grad, weight.grad


def head_of(weight: torch.Tensor) -> ChunkedHead:
    head = torch.nn.Linear(8, 17, bias=False)
    head.weight = torch.nn.Parameter(weight.clone())
    return ChunkedHead.around(head)


@pytest.mark.parametrize("chunk", [1, 7, 40, 1000])
def test_loss_and_gradients_are_autograds(chunk: int) -> None:
    given = problem(torch.float64)
    head, hidden = head_of(given["weight"]), given["hidden"].clone().requires_grad_(True)
    work = WeightedCrossEntropy(given["labels"], given["weights"], MASK, chunk=chunk)
    total, losses = head(hidden, work)
    (0.5 * total).backward()
    actual = (total.detach(), losses, hidden.grad, head.weight.grad)
    torch.testing.assert_close(actual, expected(**given), **EXACT)
    assert not losses.requires_grad


def test_bf16_stays_close_and_sums_in_fp32() -> None:
    given = problem(torch.bfloat16)
    head, hidden = head_of(given["weight"]), given["hidden"].clone().requires_grad_(True)
    total, losses = head(hidden, WeightedCrossEntropy(given["labels"], given["weights"], MASK, chunk=3))
    (0.5 * total).backward()
    assert (total.dtype, losses.dtype) == (torch.float32, torch.float32)
    assert (hidden.grad.dtype, head.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    for actual, exact in zip((total, losses, hidden.grad, head.weight.grad), expected(**given), strict=True):
        error = (actual.detach().double() - exact).abs().max()
        assert error < BF16_OF_LARGEST * exact.abs().max()


def test_the_mask_token_gets_no_gradient_and_no_probability() -> None:
    given = problem(torch.float64)
    given["weight"][MASK] = 100.0  # would win everywhere, or lose everywhere
    head = head_of(given["weight"])
    total, losses = head(given["hidden"], WeightedCrossEntropy(given["labels"], given["weights"], MASK))
    total.backward()
    assert torch.equal(head.weight.grad[MASK], torch.zeros(8, dtype=torch.float64))
    assert losses.max() < 30


def test_without_gradients_the_losses_are_the_same() -> None:
    given = problem(torch.float64)
    head = head_of(given["weight"])
    work = WeightedCrossEntropy(given["labels"], given["weights"], MASK, chunk=7)
    with torch.no_grad():
        total, losses = head(given["hidden"], work)
    assert not total.requires_grad
    torch.testing.assert_close((total, losses), expected(**given)[:2], **EXACT)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_top_tokens_leave_the_mask_token_out(chunk: int) -> None:
    given = problem(torch.float64)
    given["weight"][MASK] *= 10
    logits = given["hidden"] @ given["weight"].t()
    assert (logits.argmax(dim=-1) == MASK).any()
    ranked = logits.argsort(dim=-1, descending=True)
    allowed = ranked[ranked != MASK].view(40, 16)
    found = head_of(given["weight"])(given["hidden"], TopTokens(5, MASK, chunk=chunk))
    assert torch.equal(found, allowed[:, :5])


def test_the_head_is_the_same_layer_on_the_same_parameter() -> None:
    linear = torch.nn.Linear(8, 17, bias=False)
    head = ChunkedHead.around(linear)
    assert head.weight is linear.weight and list(dict(head.named_parameters())) == ["weight"]
    hidden = problem(torch.float32)["hidden"]
    assert torch.equal(head(hidden), linear(hidden))


def test_a_bias_is_refused() -> None:
    with pytest.raises(ValueError, match="has a bias"):
        ChunkedHead.around(torch.nn.Linear(8, 17))


@pytest.mark.slow
def test_it_compiles() -> None:
    given = problem(torch.float64)
    compiled = torch.compile(loss_and_gradient, fullgraph=True)
    for rows in (40, 33, 12):  # the last chunk is shorter
        part = slice(0, rows)
        logits = (given["hidden"] @ given["weight"].t())[part]
        arguments = (given["labels"][part], given["weights"][part].double(), MASK)
        actual = compiled(logits.clone(), *arguments)
        torch.testing.assert_close(actual, loss_and_gradient(logits.clone(), *arguments), **EXACT)
