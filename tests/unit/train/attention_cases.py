"""Packed rows with known visibility, and a float64 attention written without the code under test."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from d3d_sglang.layout import PackedLayout
from train.attention import AttentionPlan


@dataclass(frozen=True)
class Row:
    """`num_real` context tokens (the rest is padding) and a block behind each of `contexts` of them."""

    num_real: int
    contexts: tuple[int, ...]


@dataclass(frozen=True)
class Packing:
    """Rows of `context_len` tokens, then room for `num_blocks` blocks of `block_size`."""

    rows: tuple[Row, ...]
    context_len: int
    num_blocks: int
    block_size: int

    @property
    def num_tokens(self) -> int:
        """W."""
        return self.context_len + self.num_blocks * self.block_size

    def segments(self, row: Row) -> list[tuple[int, int, int]]:
        """(ctx, lo, hi) of each token of a row, by cases."""
        tokens = [(i, i, i + 1) if i < row.num_real else (0, i, i + 1) for i in range(self.context_len)]
        for block in range(self.num_blocks):
            first = len(tokens)
            if block < len(row.contexts):
                segment = (row.contexts[block], first, first + self.block_size)
                tokens += [segment] * self.block_size
            else:
                tokens += [(0, i, i + 1) for i in range(first, first + self.block_size)]
        return tokens

    def sees(self, row: Row, q: int, k: int) -> bool:
        """The mask as the paper describes it, without intervals."""
        if q == k:
            return True
        if q < self.context_len:
            return k < q < row.num_real
        block = (q - self.context_len) // self.block_size
        if block >= len(row.contexts):
            return False
        if k < self.context_len:
            return k < row.contexts[block]
        return (k - self.context_len) // self.block_size == block

    def layout(self, device: str = "cpu") -> PackedLayout:
        """The same as what training passes to the plans."""
        segments = torch.tensor([self.segments(row) for row in self.rows], device=device)  # [N, W, 3]
        ctx, lo, hi = segments.unbind(2)
        return PackedLayout(
            position_ids=(ctx + torch.arange(self.num_tokens, device=device) - lo) * (ctx > 0),
            ctx=ctx,
            lo=lo,
            hi=hi,
            prefix_len=torch.zeros(len(self.rows), dtype=torch.int64, device=device),
            num_known=self.context_len,
        )

    def mask(self) -> torch.Tensor:
        """`[N, W, W]` bool by a triple loop."""
        tokens = range(self.num_tokens)
        return torch.tensor([[[self.sees(row, q, k) for k in tokens] for q in tokens] for row in self.rows])


def random_packing(seed: int, *, ordered: bool = True) -> Packing:
    """One to three rows: answers shorter than a block, dead blocks, padding, repeated anchors."""
    rng = random.Random(seed)
    block_size = rng.choice([4, 7, 16])
    context_len = rng.choice([16, 33, 64])
    num_blocks = rng.randint(1, 6)
    rows = []
    for _ in range(rng.randint(1, 3)):
        num_real = rng.randint(2, context_len)
        contexts = [rng.randint(1, num_real) for _ in range(rng.randint(0, num_blocks))]
        rows.append(Row(num_real, tuple(sorted(contexts) if ordered else contexts)))
    return Packing(tuple(rows), context_len, num_blocks, block_size)


def training_packing(*, num_rows: int, context_len: int, num_blocks: int, block_size: int = 16) -> Packing:
    """Rows as training packs them: distinct sorted anchors, one row without padding, the others with some."""
    rng = random.Random(0)
    rows = []
    for i in range(num_rows):
        num_real = context_len - 5 * i
        anchors = sorted(rng.sample(range(num_real // 8, num_real), num_blocks - i))
        rows.append(Row(num_real, tuple(anchors)))
    return Packing(tuple(rows), context_len, num_blocks, block_size)


@dataclass(frozen=True)
class Heads:
    """Shape and type of the attention of a test."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Tensors:
    """One attention call: its inputs, its output and the gradients of `(out * grad_out).sum()`."""

    out: torch.Tensor  # [N, W, H, D]
    dq: torch.Tensor  # [N, H, W, D]
    dk: torch.Tensor  # [N, G, W, D]
    dv: torch.Tensor

    def errors(self, reference: Tensors) -> dict[str, float]:
        """Largest difference of each tensor, relative to the reference's largest value."""
        errors = {}
        for name, expected in vars(reference).items():
            difference = (getattr(self, name).cpu().double() - expected).abs().max()
            errors[name] = float(difference / expected.abs().max())
        return errors


def random_inputs(packing: Packing, heads: Heads, *, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """query, key, value and grad_out, in memory as projections leave them: tokens before heads."""
    generator = torch.Generator().manual_seed(0)

    def draw(num_heads: int) -> torch.Tensor:  # [N, heads, W, D]
        shape = (len(packing.rows), packing.num_tokens, num_heads, heads.head_dim)
        return torch.randn(shape, generator=generator).to(device, heads.dtype).transpose(1, 2)

    query, key, value = draw(heads.num_heads), draw(heads.num_kv_heads), draw(heads.num_kv_heads)
    return query, key, value, draw(heads.num_heads).transpose(1, 2)


def differentiate(
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
) -> Tensors:
    """Run an attention forward and backward."""
    query, key, value = (x.detach().requires_grad_() for x in inputs[:3])
    out = attention(query, key, value)
    out.backward(inputs[3])
    assert query.grad is not None and key.grad is not None and value.grad is not None
    return Tensors(out.detach(), query.grad, key.grad, value.grad)


def reference(packing: Packing, inputs: tuple[torch.Tensor, ...], *, scaling: float) -> Tensors:
    """Softmax attention in float64 on the CPU, over the packing's own mask."""
    mask = packing.mask()[:, None]  # [N, 1, W, W]

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2)

    return differentiate(attention, tuple(x.cpu().double() for x in inputs))


def assert_matches(
    plan: AttentionPlan, packing: Packing, heads: Heads, *, tolerance: float, device: str = "cpu"
) -> None:
    """Output and gradients of a plan against the float64 reference, from the same rounded inputs."""
    scaling = heads.head_dim**-0.5
    inputs = random_inputs(packing, heads, device=device)
    found = differentiate(lambda q, k, v: plan.attend(q, k, v, scaling=scaling), inputs)
    errors = found.errors(reference(packing, inputs, scaling=scaling))
    assert max(errors.values()) < tolerance, errors
