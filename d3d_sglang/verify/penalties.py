"""Penalties for a whole verify block, as plain decoding would apply them one token at a time.

Row j of a block is judged by the target after candidates 1..j, so that is what its penalties count: the
tokens output so far and candidates 1..j, never the prompt. Definitions and order are those of SGLang 0.5.23:
frequency, presence and min_new_tokens are added first, then repetition scales. Pure torch without host reads;
imports nothing of ours.

Legend: N rows of a batch, R rows in all, B block size, V vocabulary.
"""

from __future__ import annotations

import torch


def apply_block_penalties(
    logits: torch.Tensor,
    *,
    counts: torch.Tensor,
    draft_tokens: torch.Tensor,
    frequency: torch.Tensor | None,
    presence: torch.Tensor | None,
    repetition: torch.Tensor | None,
) -> None:
    """Apply frequency, presence and repetition penalties to `logits` in place.

    A logit x of a token output c times becomes x - c * frequency - (c > 0) * presence, and then, if c > 0, is
    multiplied by repetition where negative and divided by it elsewhere. None leaves a penalty out.

    All rows of a block share the counts of the tokens output so far. They differ only at the at most B-1
    candidates, whose logits are computed apart with the counts of their row and written over, so no count
    table of size `[N, B, V]` is needed.

    Args:
        logits: `[N, B, V]`, any float type; sums and products are fp32, rounded once each.
        counts: `[N, V]` how often each token was output, the anchor included.
        draft_tokens: `[N, B-1]` int64; fillers must be valid ids, what comes after them is never used.
        frequency, presence, repetition: `[N, 1]` fp32 or None.
    """
    block_size = logits.shape[1]
    at_draft = draft_tokens[:, None].expand(-1, block_size, -1)  # [N, B, B-1]
    draft_logits = logits.gather(2, at_draft)  # [N, B, B-1], before anything is applied
    draft_counts = counts.gather(1, draft_tokens)[:, None] + _counts_in_block(draft_tokens)  # [N, B, B-1]
    if frequency is not None or presence is not None:
        logits.sub_(_subtracted(counts, frequency, presence)[:, None])
        per_row = (x if x is None else x[:, None] for x in (frequency, presence))  # [N, 1, 1]
        draft_logits.sub_(_subtracted(draft_counts, *per_row))
    if repetition is not None:
        # One position at a time: the temporaries then have the size of [N, V].
        for column in logits.unbind(1):
            _scale(column, counts, repetition)
        _scale(draft_logits, draft_counts, repetition[:, None])
    # A candidate that occurs twice is written twice with the same value: it depends on token and row only.
    logits.scatter_(2, at_draft, draft_logits)


def apply_min_new_tokens(
    logits: torch.Tensor,
    *,
    num_output: torch.Tensor,
    min_new_tokens: torch.Tensor,
    stop_token_penalties: torch.Tensor,
) -> None:
    """Rule out stop tokens in place while a row, j candidates included, has output fewer than its minimum.

    Args:
        logits: `[N, B, V]`, before or after `apply_block_penalties`: scaling leaves -inf what it is.
        num_output: `[N]` tokens output so far, the anchor included.
        min_new_tokens: `[N, 1]`.
        stop_token_penalties: `[N, V]`, -inf at stop tokens and 0 elsewhere.
    """
    for j, column in enumerate(logits.unbind(1)):
        too_short = num_output[:, None] + j < min_new_tokens  # [N, 1]
        column.add_(torch.where(too_short, stop_token_penalties, 0.0))


def update_counts(
    counts: torch.Tensor, rows: torch.Tensor, out_tokens: torch.Tensor, *, accept_len: torch.Tensor
) -> None:
    """Add the `accept_len + 1` tokens each row committed to `counts` in place.

    Args:
        counts: `[R, V]`, contiguous.
        rows: `[N]` int64 indices into R.
        out_tokens: `[N, B]` int64; entries past `accept_len` are fillers, but valid token ids.
        accept_len: `[N]`.
    """
    position = torch.arange(out_tokens.shape[1], device=out_tokens.device)
    committed = position <= accept_len[:, None]  # [N, B]
    index = rows[:, None] * counts.shape[1] + out_tokens  # [N, B]
    counts.view(-1).scatter_add_(0, index.flatten(), committed.flatten().to(counts.dtype))


def _counts_in_block(draft_tokens: torch.Tensor) -> torch.Tensor:
    """`[N, B, B-1]`: how often row n's candidate i + 1 occurs among its first j candidates, at (n, j, i)."""
    same = draft_tokens[:, :, None] == draft_tokens[:, None, :]  # [N, B-1, B-1]
    occurrences = same.to(torch.int64).cumsum(dim=1)  # entry (n, j-1, i) counts among the first j
    return torch.nn.functional.pad(occurrences, (0, 0, 1, 0))


def _subtracted(
    counts: torch.Tensor, frequency: torch.Tensor | None, presence: torch.Tensor | None
) -> torch.Tensor:
    """What frequency and presence take off the logits, fp32, of the shape of `counts`."""
    total = torch.zeros(counts.shape, dtype=torch.float32, device=counts.device)
    if frequency is not None:
        total.add_(counts * frequency)
    if presence is not None:
        total.add_((counts > 0) * presence)
    return total


def _scale(logits: torch.Tensor, counts: torch.Tensor, repetition: torch.Tensor) -> None:
    """Divide the logits of tokens output before by `repetition`, or multiply if negative, in place."""
    factor = torch.where(counts > 0, repetition, 1.0)
    logits.copy_(torch.where(logits < 0, logits * factor, logits / factor))
