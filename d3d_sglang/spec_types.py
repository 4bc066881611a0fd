"""The messages between drafting, verifying and committing: what each stage hands to the next.

Owns these types and nothing else; holds no logic and imports only torch. Every stage that needs to
talk to another one meets it here instead of importing it.

Legend: N rows (requests of a batch), B block size, K tokens in the support of a draft distribution.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import torch

Message = TypeVar("Message")


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`. The host waits only for a copy to the CPU, which reads it at once."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def on_device(message: Message, device: torch.device) -> Message:
    """A message of this package with all its tensors on `device`; what is there already is not copied."""
    assert dataclasses.is_dataclass(message) and not isinstance(message, type)
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if isinstance(value, torch.Tensor) and value.device != device:
            changed[field.name] = moved(value, device)
        elif dataclasses.is_dataclass(value):
            changed[field.name] = on_device(value, device)
    return dataclasses.replace(message, **changed) if changed else message


@dataclass(frozen=True)
class DraftProposal:
    """Candidates of one round and the distribution q each was drawn from.

    Attributes:
        tokens: `[N, B-1]` int64, candidate j (from 1) of row n in column j-1.
        prop_len: `[N]` int64, candidates row n really has, 0..B-1; columns from there on are filler.
        support_ids: `[N, B-1, K]` int64, the K most likely drafter tokens of each position, best first.
        support_probs: `[N, B-1, K]` fp32, q over the support, renormalised; 1 on one token if greedy.
    """

    tokens: torch.Tensor
    prop_len: torch.Tensor
    support_ids: torch.Tensor
    support_probs: torch.Tensor


@dataclass(frozen=True)
class VerifyResult:
    """What the target made of the candidates.

    Attributes:
        out_tokens: `[N, B]` int64; the first `accept_len[n] + 1` of row n are its new tokens, the rest is
            filler.
        accept_len: `[N]` int64, candidates accepted, the bonus token not counted, 0..B-1.
        bonus: `[N]` int64, the token the target added: `out_tokens[n, accept_len[n]]`.
    """

    out_tokens: torch.Tensor
    accept_len: torch.Tensor
    bonus: torch.Tensor


@dataclass(frozen=True)
class BlockDrafts:
    """Blocks one drafter pass drafted, R a row.

    Attributes:
        tokens: `[N, R, B-1]` int64, the tokens after each block's anchor.
        support_ids: `[N, R, B-1, K]` int64, the K most likely tokens of each position, most likely first.
        support_probs: `[N, R, B-1, K]` fp32, what `tokens` were drawn from, as in `DraftProposal`.
    """

    tokens: torch.Tensor
    support_ids: torch.Tensor
    support_probs: torch.Tensor


@dataclass(frozen=True)
class BranchSet:
    """Outcomes of a verification to draft ahead, R a row; the last one is full acceptance.

    Attributes:
        accept_len: `[N, R]` int64, candidates accepted in this outcome.
        anchor: `[N, R]` int64, first token of the branch's block: the bonus of this outcome, except in the
            last branch, whose bonus is guessed by its first drafted token.
        context_offset: `[N, R]` int64, tokens of the verified block (anchor included) the branch builds on.
        planned: `[N, R]` bool; False where the row has no such candidate, the branch is then never chosen.
    """

    accept_len: torch.Tensor
    anchor: torch.Tensor
    context_offset: torch.Tensor
    planned: torch.Tensor


class Origin(IntEnum):
    """Where a proposal comes from; the numbers travel in device tensors."""

    REDRAFT = 0  # drafted on demand
    HIT = 1  # drafted ahead of a rejection
    FULL = 2  # drafted ahead of full acceptance
    SIBLING = 3  # the nearest tokens after a miss
    NONE = 4  # the row decodes without drafts


@dataclass(frozen=True)
class Selection:
    """Next proposals after a verification.

    Attributes:
        proposal: for rows with `origin` REDRAFT it is arbitrary.
        origin: `[N]` int64 values of `Origin`; REDRAFT says that a block has to be drafted on demand.
    """

    proposal: DraftProposal
    origin: torch.Tensor
