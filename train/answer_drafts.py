"""What a drafter proposes at every anchor of known answers, in packed passes of bounded size.

Every block is drafted behind the same tokens, at the same positions and with the same view as when it is
served, so nothing here can make a draft better than the server's. Anchors of one answer share its context.

Legend: L prompt length, T response length, S context columns, B block size, R ranks kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from train.acceptance import AnswerDrafts
from train.dataset import Example
from train.model import TrainModel
from train.packing import pack

# More anchors a row share the context of one, but attention grows with the square of the row.
MAX_ANCHORS_PER_ROW = 128
CONTEXT_MULTIPLE = 64


@dataclass(frozen=True)
class AnchorRange:
    """Anchors `first` to `last` of an example, one row of a pass; both 1-based and drafted."""

    example: int
    prompt_len: int
    first: int
    last: int

    @property
    def num_anchors(self) -> int:
        return self.last - self.first + 1

    @property
    def num_context(self) -> int:
        """Columns for the prompt and the response up to the token after the last anchor, rounded up."""
        return _round_up(self.prompt_len + self.last + 1)


def plan_passes(
    lengths: Sequence[tuple[int, int]], *, block_size: int, batch_tokens: int
) -> list[list[AnchorRange]]:
    """Every anchor of examples of `lengths` (L, T) once, in passes of at most `batch_tokens` columns.

    Raises:
        ValueError: one block of the longest example does not fit.
    """
    ranges = [
        anchors
        for example, (prompt_len, response_len) in enumerate(lengths)
        for anchors in _ranges(
            example, prompt_len, response_len, block_size=block_size, batch_tokens=batch_tokens
        )
    ]
    ranges.sort(key=lambda anchors: (anchors.num_anchors, anchors.num_context))
    passes: list[list[AnchorRange]] = []
    for anchors in ranges:
        if passes and _num_columns([*passes[-1], anchors], block_size=block_size) <= batch_tokens:
            passes[-1].append(anchors)
        else:
            passes.append([anchors])
    return passes


def draft_answers(
    model: TrainModel,
    examples: Sequence[Example],
    *,
    block_size: int,
    top: int,
    batch_tokens: int,
) -> Iterator[tuple[int, AnswerDrafts]]:
    """The drafts of each example and its number, as they are ready; `top` is R.

    Raises:
        ValueError: an example that cannot be packed, or that `batch_tokens` has no room for.
    """
    lengths = [(len(example.prompt_ids), len(example.response_ids)) for example in examples]
    unfinished: dict[int, NDArray[np.int32]] = {}
    left = {number: response_len - 1 for number, (_, response_len) in enumerate(lengths)}
    for ranges in plan_passes(lengths, block_size=block_size, batch_tokens=batch_tokens):
        drafts = _run(model, examples, ranges, block_size=block_size, top=top)  # [N, K, B-1, R]
        for row, anchors in zip(drafts, ranges, strict=True):
            number = anchors.example
            if number not in unfinished:
                unfinished[number] = np.empty((lengths[number][1] - 1, block_size - 1, top), np.int32)
            unfinished[number][anchors.first - 1 : anchors.last] = row[: anchors.num_anchors]
            left[number] -= anchors.num_anchors
            if left[number] == 0:
                yield number, AnswerDrafts(examples[number].response_ids, unfinished.pop(number))


def _run(
    model: TrainModel,
    examples: Sequence[Example],
    ranges: Sequence[AnchorRange],
    *,
    block_size: int,
    top: int,
) -> NDArray[np.int64]:
    starts = [
        Example(example.id, example.prompt_ids, example.response_ids[: anchors.last + 1])
        for anchors in ranges
        for example in [examples[anchors.example]]
    ]
    batch = pack(
        starts,
        block_size=block_size,
        num_anchors=max(anchors.num_anchors for anchors in ranges),
        gamma=1.0,  # only weighs losses
        mask_token_id=model.mask_token_id,
        multiple_of=CONTEXT_MULTIPLE,
        anchors=[np.arange(anchors.first, anchors.last + 1) for anchors in ranges],
    )
    device = next(model.parameters()).device
    return model.drafts(batch.to(device), top=top).cpu().numpy()


def _ranges(
    example: int, prompt_len: int, response_len: int, *, block_size: int, batch_tokens: int
) -> Iterator[AnchorRange]:
    longest = _round_up(prompt_len + response_len)
    fit = (batch_tokens - longest) // block_size
    if fit < 1:
        raise ValueError(
            f"batch_tokens is {batch_tokens}, it must be at least {longest + block_size}: an example has "
            f"{prompt_len} prompt and {response_len} response tokens"
        )
    step = min(fit, MAX_ANCHORS_PER_ROW)
    for first in range(1, response_len, step):
        yield AnchorRange(example, prompt_len, first, min(first + step, response_len) - 1)


def _num_columns(ranges: Sequence[AnchorRange], *, block_size: int) -> int:
    context = max(anchors.num_context for anchors in ranges)
    blocks = max(anchors.num_anchors for anchors in ranges)
    return len(ranges) * (context + blocks * block_size)


def _round_up(length: int) -> int:
    return -(-length // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE
