"""Examples to one training batch: a shared causal context and K anchor blocks of each example (paper, 3.2).

Owns the layout of a training pass, which positions predict what, and with which weight. Pure numpy up to the
final tensors, so it runs in a data-loading process; the only randomness is the caller's generator.

Legend: N rows (one example each), L prompt length, T response length, S context columns, K blocks of a row,
B block size, W = S + K*B columns, M predicting positions of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from d3d_sglang.layout import PackedLayout
from train.dataset import Example

Ints = NDArray[np.int64]
MapTensor = Callable[[torch.Tensor], torch.Tensor]
Holder = TypeVar("Holder", "PackedLayout", "Targets")


@dataclass(frozen=True)
class Targets:
    """What to predict, where, and how much it counts. The weights of an example sum to 1.

    The loss of a batch is `sum(weights * cross entropy) / N`.

    Attributes:
        index: `[M]` int64 into the flattened `[N*W]` positions: the position whose hidden state predicts.
        labels: `[M]` int64 token ids.
        weights: `[M]` fp32.
    """

    index: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class PackedBatch:
    """N examples as rows: S context columns (prompt, response, padding), then K blocks of B.

    Attributes:
        token_ids: `[N, W]` int64; padding and the blocks a row does not have hold the mask token.
        layout: who sees what, at which positions; num_known is S, and nothing is cached.
        diff: masked block positions, each predicting the token at its SAME position (equation 5).
        ar: context positions, each predicting the NEXT token: r_1 from the last prompt token on (equation 6).
        block_size: B.
        num_tokens: tokens that are no padding, context and blocks.
        num_pairs: (query, visible key) pairs of those tokens.
    """

    token_ids: torch.Tensor
    layout: PackedLayout
    diff: Targets
    ar: Targets
    block_size: int
    num_tokens: int
    num_pairs: int

    @property
    def num_rows(self) -> int:
        """N."""
        return self.layout.num_rows

    @property
    def num_blocks(self) -> int:
        """K."""
        return (self.layout.num_window - self.layout.num_known) // self.block_size

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedBatch:
        """The batch on a device; from pinned memory, `non_blocking` copies run beside the host."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        """The batch in page-locked host memory; `torch.utils.data.DataLoader` calls this method."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: MapTensor) -> PackedBatch:
        return dataclasses.replace(
            self,
            token_ids=change(self.token_ids),
            layout=_map_tensors(self.layout, change),
            diff=_map_tensors(self.diff, change),
            ar=_map_tensors(self.ar, change),
        )


def pack(
    examples: Sequence[Example],
    *,
    block_size: int,
    num_anchors: int,
    gamma: float,
    mask_token_id: int,
    generator: np.random.Generator | None = None,
    multiple_of: int = 64,
    anchors: Sequence[NDArray[np.integer]] | None = None,
) -> PackedBatch:
    """Pack examples as the rows of one batch.

    An anchor s (1-based, r_s is visible) has its block at positions L+s-1 and on, sees the context before
    that position, and itself. A row has min(K, T-1) anchors, ascending; context columns past its tokens and
    blocks past its anchors see only themselves and predict nothing.

    Args:
        num_anchors: K; every batch has this many blocks a row.
        gamma: the weight of the j-th masked position is exp(-(j-1) / gamma) (equation 4).
        generator: draws the anchors; not needed when `anchors` are given.
        multiple_of: S is rounded up to a multiple of it.
        anchors: for every example its anchors, ascending, each from 1 to T-1, at most K.

    Raises:
        ValueError: a setting out of range, or an example that cannot be trained on.
    """
    _check_settings(block_size=block_size, num_anchors=num_anchors, gamma=gamma, multiple_of=multiple_of)
    if not examples:
        raise ValueError("examples is empty: a batch needs at least one")
    for example in examples:
        _check_example(example, mask_token_id=mask_token_id)
    prompt_len = np.array([len(example.prompt_ids) for example in examples])  # [N]
    response_len = np.array([len(example.response_ids) for example in examples])
    length = prompt_len + response_len
    num_context = -(-int(length.max()) // multiple_of) * multiple_of  # S
    if anchors is None:
        if generator is None:
            raise ValueError("generator is None: it must be given unless anchors are")
        anchors = [_draw(generator, count=num_anchors, response_len=int(t)) for t in response_len]
    at = _anchor_positions(anchors, prompt_len, response_len, num_anchors=num_anchors)  # [N, K]

    token_ids = np.full((len(examples), num_context + num_anchors * block_size), mask_token_id, np.int64)
    for row, example in zip(token_ids, examples, strict=True):
        row[: len(example.prompt_ids)] = example.prompt_ids
        row[len(example.prompt_ids) :][: len(example.response_ids)] = example.response_ids
    rows = np.arange(len(examples))[:, None]
    live = at >= 0
    token_ids[:, num_context::block_size] = np.where(live, token_ids[rows, at], mask_token_id)

    layout = _layout(at, length, num_context=num_context, block_size=block_size)
    num_blocks = int(live.sum())
    num_tokens = int(length.sum()) + num_blocks * block_size
    causal_pairs = int((length * (length + 1) // 2).sum())
    block_pairs = block_size * (int(at[live].sum()) + num_blocks * block_size)
    return PackedBatch(
        token_ids=torch.from_numpy(token_ids),
        layout=layout,
        diff=_diff_targets(
            token_ids, at, length, num_context=num_context, block_size=block_size, gamma=gamma
        ),
        ar=_ar_targets(token_ids, prompt_len, length, num_context=num_context),
        block_size=block_size,
        num_tokens=num_tokens,
        num_pairs=causal_pairs + block_pairs,
    )


def _check_settings(*, block_size: int, num_anchors: int, gamma: float, multiple_of: int) -> None:
    if block_size < 2:
        raise ValueError(f"block_size is {block_size}, it must be at least 2: an anchor and one masked token")
    if num_anchors < 1:
        raise ValueError(f"num_anchors is {num_anchors}, it must be at least 1")
    if not gamma > 0:
        raise ValueError(f"gamma is {gamma}, it must be above 0")
    if multiple_of < 1:
        raise ValueError(f"multiple_of is {multiple_of}, it must be at least 1")


def _check_example(example: Example, *, mask_token_id: int) -> None:
    if len(example.prompt_ids) < 1 or len(example.response_ids) < 2:
        raise ValueError(
            f"example {example.id!r} has {len(example.prompt_ids)} prompt tokens and "
            f"{len(example.response_ids)} response tokens: it must have at least 1 and 2"
        )
    # Its logit is -inf: as a label it would make the loss infinite.
    if mask_token_id in example.response_ids:
        raise ValueError(
            f"response_ids of example {example.id!r} holds the mask token {mask_token_id}: it must be a "
            "reserved id that never occurs in text"
        )


def _draw(generator: np.random.Generator, *, count: int, response_len: int) -> Ints:
    available = response_len - 1
    if available <= count:
        return np.arange(1, response_len)
    return np.sort(generator.choice(available, size=count, replace=False, shuffle=False)) + 1


def _anchor_positions(
    anchors: Sequence[NDArray[np.integer]], prompt_len: Ints, response_len: Ints, *, num_anchors: int
) -> Ints:
    """Row index of every block's anchor in its context, `[N, K]`; -1 where the row has no such block."""
    if len(anchors) != len(prompt_len):
        raise ValueError(
            f"anchors has {len(anchors)} rows, it must have one for each of {len(prompt_len)} examples"
        )
    at = np.full((len(anchors), num_anchors), -1, np.int64)
    for row, chosen, prompt, response in zip(at, anchors, prompt_len, response_len, strict=True):
        chosen = np.asarray(chosen, np.int64)
        ascending = len(chosen) > 0 and chosen[0] >= 1 and (np.diff(chosen) > 0).all()
        if not ascending or chosen[-1] >= response or len(chosen) > num_anchors:
            raise ValueError(
                f"anchors of a row are {chosen.tolist()}: they must be ascending, from 1 to {response - 1}, "
                f"and 1 to {num_anchors} of them"
            )
        row[: len(chosen)] = prompt + chosen - 1
    return at


def _layout(at: Ints, length: Ints, *, num_context: int, block_size: int) -> PackedLayout:
    num_rows, num_blocks = at.shape
    num_window = num_context + num_blocks * block_size
    column = np.arange(num_window)
    # Padding sees itself alone, so that no row of the attention is empty.
    position, ctx = np.zeros((2, num_rows, num_window), np.int64)
    lo = np.repeat(column[None], num_rows, axis=0)
    hi = lo + 1
    causal = np.where(column[:num_context] < length[:, None], column[:num_context], 0)
    position[:, :num_context] = causal
    ctx[:, :num_context] = causal
    live = (at >= 0)[:, :, None]  # [N, K, 1]
    in_block = np.arange(block_size)
    blocks = (num_rows, num_blocks, block_size)
    first = num_context + block_size * np.arange(num_blocks)[:, None]  # [K, 1]
    own = first + in_block  # [K, B]
    position[:, num_context:] = np.where(live, at[:, :, None] + in_block, 0).reshape(num_rows, -1)
    ctx[:, num_context:] = np.broadcast_to(np.where(live, at[:, :, None], 0), blocks).reshape(num_rows, -1)
    lo[:, num_context:] = np.where(live, first, own).reshape(num_rows, -1)
    hi[:, num_context:] = np.where(live, first + block_size, own + 1).reshape(num_rows, -1)
    return PackedLayout(
        position_ids=torch.from_numpy(position),
        ctx=torch.from_numpy(ctx),
        lo=torch.from_numpy(lo),
        hi=torch.from_numpy(hi),
        prefix_len=torch.zeros(num_rows, dtype=torch.int64),
        num_known=num_context,
    )


def _diff_targets(
    token_ids: Ints, at: Ints, length: Ints, *, num_context: int, block_size: int, gamma: float
) -> Targets:
    num_window = token_ids.shape[1]
    masked = np.arange(1, block_size)  # j
    answer_at = at[:, :, None] + masked  # [N, K, B-1] where the token to predict stands in the context
    supervised = (at >= 0)[:, :, None] & (answer_at < length[:, None, None])
    decay = np.where(supervised, np.exp(-(masked - 1) / gamma), 0.0)
    weights = decay / decay.sum(axis=(1, 2), keepdims=True)  # Z: one normaliser over all blocks of an example
    row, block, offset = np.nonzero(supervised)
    return _targets(
        index=row * num_window + num_context + block * block_size + masked[offset],
        labels=token_ids[row, answer_at[supervised]],
        weights=weights[supervised],
    )


def _ar_targets(token_ids: Ints, prompt_len: Ints, length: Ints, *, num_context: int) -> Targets:
    column = np.arange(num_context)
    predicts = (column >= prompt_len[:, None] - 1) & (column < length[:, None] - 1)  # [N, S]
    row, at = np.nonzero(predicts)
    return _targets(
        index=row * token_ids.shape[1] + at,
        labels=token_ids[row, at + 1],
        weights=1.0 / (length - prompt_len)[row],
    )


def _targets(*, index: Ints, labels: Ints, weights: NDArray[np.float64]) -> Targets:
    return Targets(
        index=torch.from_numpy(index),
        labels=torch.from_numpy(labels),
        weights=torch.from_numpy(weights.astype(np.float32)),
    )


def _map_tensors(holder: Holder, change: MapTensor) -> Holder:
    tensors = {
        field.name: change(value)
        for field in dataclasses.fields(holder)
        if isinstance(value := getattr(holder, field.name), torch.Tensor)
    }
    return dataclasses.replace(holder, **tensors)
