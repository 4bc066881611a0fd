"""What the benchmarks of training attention measure: shapes of models, packed rows, a timed call.

Legend: N rows, S context tokens, K blocks of B, W = S + K * B, H query heads, G K/V heads, D head size.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from d3d_sglang.layout import PackedLayout
from train.attention import AttentionName, AttentionPlan, make_plan

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """A model's sizes."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    num_layers: int


SMOLLM2 = Shape("smollm2", 9, 3, 64, 576, 1536, 30)
QWEN3 = Shape("qwen3_1p7b", 16, 8, 128, 2048, 6144, 28)
# Sizes of a rehearsal.
QUICK_SIZES: dict[str, Any] = {"num_rows": 1, "context_len": 32, "num_blocks": 3}


@dataclass(frozen=True)
class Case:
    """One measurement: N rows of S context tokens and K blocks."""

    kind: str  # layer or stack
    shape: Shape
    num_rows: int
    context_len: int
    num_blocks: int

    @property
    def name(self) -> str:
        """As it starts the names of metrics."""
        return f"{self.kind}_{self.shape.name}_s{self.context_len}_k{self.num_blocks}"


@dataclass(frozen=True)
class Setting:
    """Where and how everything is measured."""

    device: torch.device
    dtype: torch.dtype
    names: tuple[AttentionName, ...]
    repeats: int
    seconds: float
    steps_per_wait: int = 4

    def sync(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def plan(self, name: AttentionName, case: Case, layout: PackedLayout) -> AttentionPlan:
        """A plan of `case` in this type."""
        return make_plan(
            name,
            layout,
            num_heads=case.shape.num_heads,
            num_kv_heads=case.shape.num_kv_heads,
            head_dim=case.shape.head_dim,
            dtype=self.dtype,
        )


def training_layout(case: Case, device: torch.device) -> PackedLayout:
    """Rows of `case`: context, padding, blocks at distinct sorted anchors of the answer."""
    rng = random.Random(0)
    rows = []
    for _ in range(case.num_rows):
        num_real = rng.randint(case.context_len * 4 // 5, case.context_len)
        prompt_len = case.context_len // 4
        anchors = sorted(rng.sample(range(prompt_len, num_real), min(case.num_blocks, num_real - prompt_len)))
        tokens = [(i, i, i + 1, i) for i in range(num_real)]
        tokens += [(0, i, i + 1, 0) for i in range(num_real, case.context_len)]
        for ctx in anchors:
            first = len(tokens)
            tokens += [(ctx, first, first + BLOCK_SIZE, ctx + j) for j in range(BLOCK_SIZE)]
        num_tokens = case.context_len + case.num_blocks * BLOCK_SIZE
        tokens += [(0, i, i + 1, 0) for i in range(len(tokens), num_tokens)]
        rows.append(tokens)
    ctx, lo, hi, position_ids = torch.tensor(rows, device=device).unbind(2)
    prefix_len = torch.zeros(case.num_rows, dtype=torch.int64, device=device)
    return PackedLayout(position_ids, ctx, lo, hi, prefix_len, num_known=case.context_len)


def real_tokens(layout: PackedLayout) -> torch.Tensor:
    """`[N, W]` bool: context and live blocks, not padding."""
    real = layout.ctx > 0
    real[:, 0] = True  # the first token of a row has nothing before it either
    return real


def visible_pairs(layout: PackedLayout) -> int:
    """Pairs of query and key that the mask leaves, padding aside."""
    return int(((layout.ctx + layout.hi - layout.lo) * real_tokens(layout)).sum())


def attention_inputs(case: Case, setting: Setting, dtype: torch.dtype) -> list[torch.Tensor]:
    """query, key, value and grad_out; heads lie behind tokens in memory, as projections leave them."""
    generator = torch.Generator(setting.device).manual_seed(0)
    num_tokens = case.context_len + case.num_blocks * BLOCK_SIZE
    shape = case.shape

    def draw(heads: int) -> torch.Tensor:  # [N, W, heads, D]
        size = (case.num_rows, num_tokens, heads, shape.head_dim)
        return torch.randn(size, generator=generator, device=setting.device).to(dtype)

    query, key, value = (draw(n).transpose(1, 2) for n in (shape.num_heads, *[shape.num_kv_heads] * 2))
    return [query, key, value, draw(shape.num_heads)]


def differentiate(plan: AttentionPlan, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Output and the gradients of query, key and value."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = plan.attend(*leaves, scaling=inputs[0].shape[3] ** -0.5)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


def milliseconds(step: Callable[[], Any], setting: Setting, *, seconds: float) -> float:
    """Mean time of `step`, run for at least `seconds`; the device is waited for every `steps_per_wait`."""
    setting.sync()
    start, num_steps = time.perf_counter(), 0
    while num_steps == 0 or time.perf_counter() - start < seconds:
        for _ in range(setting.steps_per_wait):
            step()
        num_steps += setting.steps_per_wait
        setting.sync()
    return (time.perf_counter() - start) / num_steps * 1e3


def shrunk(case: Case) -> Case:
    """The same case for a rehearsal."""
    shape = replace(
        case.shape,
        num_heads=case.shape.num_heads // case.shape.num_kv_heads,
        num_kv_heads=1,
        head_dim=16,
        hidden_size=48,
        intermediate_size=64,
        num_layers=2,
    )
    # Cases keep their names apart by their length.
    return replace(case, shape=shape, **(QUICK_SIZES | {"context_len": case.context_len // 32}))
