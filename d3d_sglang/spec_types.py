"""The messages between drafting, verifying and committing: what each stage hands to the next.

Owns the two dataclasses and nothing else; holds no logic and imports only torch. Every stage that needs to
talk to another one meets it here instead of importing it.

Legend: N rows (requests of a batch), B block size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DraftProposal:
    """Candidates of one round.

    Attributes:
        tokens: `[N, B-1]` int64, candidate j (from 1) of row n in column j-1; columns from `prop_len[n]` on
            are filler.
        prop_len: `[N]` int64, candidates row n really has, 0..B-1.
    """

    tokens: torch.Tensor
    prop_len: torch.Tensor


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
