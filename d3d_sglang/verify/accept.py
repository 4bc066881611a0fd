"""Acceptance: how many candidates of each row the target confirms, and the token it adds.

Pure torch without host reads, so it can run inside a captured graph. Where the target's tokens come from
(argmax or a sample) is the caller's business. Imports `spec_types` only.

Legend: N rows, B block size.
"""

from __future__ import annotations

import torch

from d3d_sglang.spec_types import VerifyResult


def accept_block(
    draft_tokens: torch.Tensor, prop_len: torch.Tensor, target_tokens: torch.Tensor
) -> VerifyResult:
    """Accept candidates up to the first one that differs from the target's own choice (paper, section 3.4).

    Greedy targets confirm exactly the tokens plain decoding would emit. A sampled target, with
    `target_tokens[n, j]` one draw from its distribution p after candidates 1..j, gives exact rejection
    sampling for a draft that puts all its mass on one candidate d (q = e_d): that accepts d with probability
    min(1, p(d) / q(d)) = p(d), and else draws from the residual max(p - q, 0), which is p without d,
    renormalised. Drawing x from p and accepting iff x = d does both: P(x = d) = p(d), and given x != d, x has
    the residual's distribution and is the emitted token. Every column needs a draw of its own; draws past the
    first difference are made after wrong tokens and are dropped.

    Args:
        draft_tokens: `[N, B-1]` int64 candidates.
        prop_len: `[N]` int64, candidates row n really has; none at or past it is accepted.
        target_tokens: `[N, B]` int64, column j is the target's choice after candidates 1..j.

    Returns:
        Accept lengths 0..`prop_len`; `out_tokens` is `target_tokens`, whose first `accept_len` entries equal
        the candidates and whose entry `accept_len` is the bonus.
    """
    confirmed = draft_tokens == target_tokens[:, :-1]  # [N, B-1]
    num_confirmed = confirmed.cumprod(dim=1, dtype=torch.int64).sum(dim=1)  # [N]
    accept_len = torch.minimum(num_confirmed, prop_len)
    bonus = target_tokens.gather(1, accept_len[:, None]).squeeze(1)  # [N]
    return VerifyResult(out_tokens=target_tokens, accept_len=accept_len, bonus=bonus)
