"""Cross entropy through the output head, without ever holding the logits of all positions.

The head runs chunk by chunk, and a chunk's gradient is taken while its logits are there: a training step
costs the head's three matrix products and keeps `[M, E]` and `[V, E]` gradients in place of `[M, V]` logits.
Softmax, losses and their sums are fp32 (float64 for a float64 model), whatever the model computes in.

Legend: M predicting positions, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

DEFAULT_CHUNK = 2048  # positions; 2048 x V = 151,936 is 1.2 GB a copy in fp32

Result = TypeVar("Result")
# (logits [m, V], labels [m], weights [m], mask_token_id) -> losses [m], gradient [m, V]
LossAndGradient = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


class ChunkedHead(torch.nn.Linear):
    """The output head of a causal LM, which hands its weight to work that reads it more than once.

    The work runs inside one call of the module, however many chunks it has. So ZeRO-3, which gathers a
    module's weight around its calls, gathers it once, and as often on every rank.
    """

    @classmethod
    def around(cls, head: torch.nn.Linear) -> ChunkedHead:
        """A head on the same parameter as `head`, tied or not.

        Raises:
            ValueError: the head has a bias, which no supported family has.
        """
        if head.bias is not None:
            raise ValueError("the output head has a bias: a drafter's head must have none")
        new: ChunkedHead = torch.nn.utils.skip_init(
            cls, head.in_features, head.out_features, bias=False, device="meta"
        )
        new.weight = head.weight
        return new

    def forward(
        self, hidden: torch.Tensor, work: Callable[[torch.Tensor, torch.Tensor], Any] | None = None
    ) -> Any:
        """Logits of `hidden`, or what `work(hidden, weight)` makes of them."""
        return super().forward(hidden) if work is None else work(hidden, self.weight)


def loss_and_gradient(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, mask_token_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy `[m]` of `logits` `[m, V]`, and the gradient `[m, V]` of its weighted sum.

    The mask token has no probability. `logits` may be overwritten. Plain tensor code that torch.compile can
    fuse into two passes over them.
    """
    log_probs = _log_probs(logits, mask_token_id)
    losses = -log_probs.gather(1, labels[:, None]).squeeze(1)
    gradient = log_probs.exp_()
    gradient.scatter_add_(1, labels[:, None], gradient.new_full((len(labels), 1), -1.0))
    return losses, gradient.mul_(weights[:, None]).to(logits.dtype)


@dataclass(frozen=True)
class WeightedCrossEntropy:
    """Work for `ChunkedHead`: `sum(weights * cross entropy)` and the cross entropy of every position.

    Only the sum has a gradient. Attributes:
        labels: `[M]` token ids; weights: `[M]`, all factors of the loss included.
        mask_token_id: its logit is -inf.
        chunk: positions whose logits exist at once.
        compute: `loss_and_gradient`, or a compiled one.
    """

    labels: torch.Tensor
    weights: torch.Tensor
    mask_token_id: int
    chunk: int = DEFAULT_CHUNK
    compute: LossAndGradient = loss_and_gradient

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scalar and `[M]` from `hidden` `[M, E]` and the head's `weight` `[V, E]`."""
        total, losses = _ChunkedCrossEntropy.apply(hidden, weight, self, torch.is_grad_enabled())
        return total, losses


@dataclass(frozen=True)
class TopTokens:
    """Work for `ChunkedHead`: the `top` most likely ids `[M, top]`, best first, never the mask token."""

    top: int
    mask_token_id: int
    chunk: int = DEFAULT_CHUNK

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """From `hidden` `[M, E]` and the head's `weight` `[V, E]`."""
        found = []
        for part in hidden.split(self.chunk):
            logits = part @ weight.t()
            logits[:, self.mask_token_id] = float("-inf")
            found.append(logits.topk(self.top, dim=-1).indices)
        return torch.cat(found)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, work: WeightedCrossEntropy, training: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        losses = hidden.new_empty(len(hidden), dtype=wide)
        weights = work.weights.to(wide)
        grad_hidden = torch.empty_like(hidden) if training else None
        # Summed in fp32: bf16 sums of many chunks lose small terms.
        grad_weight = torch.zeros_like(weight, dtype=wide) if training else None
        for start in range(0, len(hidden), work.chunk):
            part = slice(start, start + work.chunk)
            logits = hidden[part] @ weight.t()
            if grad_hidden is None or grad_weight is None:
                log_probs = _log_probs(logits, work.mask_token_id)
                losses[part] = -log_probs.gather(1, work.labels[part, None]).squeeze(1)
                continue
            losses[part], grad_logits = work.compute(
                logits, work.labels[part], weights[part], work.mask_token_id
            )
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            grad_weight += grad_logits.t() @ hidden[part]
        ctx.gradients = None if grad_weight is None else (grad_hidden, grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(losses)
        return (weights * losses).sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        assert ctx.gradients is not None, "backward of a loss that was computed without gradients"
        grad_hidden, grad_weight = ctx.gradients
        # Rounding the factor scales every gradient of the model alike.
        factor = grad_total.to(grad_hidden.dtype)
        return grad_hidden * factor, grad_weight * factor, None, None


def _log_probs(logits: torch.Tensor, mask_token_id: int) -> torch.Tensor:
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores[:, mask_token_id] = float("-inf")
    return scores.log_softmax(dim=-1)
