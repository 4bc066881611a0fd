"""Sampled verification: what the target would sample from, and exact acceptance of drawn candidates.

Pure torch without host reads, so it can run inside a captured graph. Randomness comes in as coins
(`coins.py` makes them). Imports `spec_types` only.

Legend: N rows, M positions, B block size, V vocabulary, K support size; p target, q draft distribution.
"""

from __future__ import annotations

import torch

from d3d_sglang.spec_types import DraftProposal, VerifyResult


def filtered_probs(
    logits: torch.Tensor,
    *,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    min_ps: torch.Tensor | None,
) -> torch.Tensor:
    """The distribution plain decoding samples from, as SGLang 0.5.23's PyTorch sampler defines it.

    Of softmax(logits / temperature) a token is kept if fewer than top_k tokens come before it in descending
    order, if those together have at most top_p, and if its own probability is at least min_p times the
    largest; all three look at the probabilities before any is dropped. What is kept is renormalised. Equal
    probabilities are ordered by id. A greedy row (top_k 1) becomes 1 at the argmax of its logits.

    None for a filter says that no row uses it. Without top_k and top_p nothing has to be sorted.

    Args:
        logits: `[N, M, V]`, any float type, left as they are.
        temperatures: `[N, 1]`, above 0.
        top_ks, top_ps, min_ps: `[N]` or None.

    Returns:
        `[N, M, V]` fp32.
    """
    probs = torch.softmax(logits.float() / temperatures[:, :, None], dim=-1)
    if top_ks is not None or top_ps is not None:
        probs = _truncated(probs, top_ks=top_ks, top_ps=top_ps)
    if min_ps is not None:
        least = probs.amax(dim=-1, keepdim=True) * min_ps[:, None, None]  # [N, M, 1]
        probs = torch.where(probs < least, 0.0, probs)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    if top_ks is None:
        return probs
    ids = torch.arange(logits.shape[-1], device=logits.device)
    certain = (ids == logits.argmax(dim=-1, keepdim=True)).to(probs.dtype)  # [N, M, V]
    return torch.where((top_ks == 1)[:, None, None], certain, probs)


def reject_sample(
    proposal: DraftProposal,
    target_probs: torch.Tensor,
    *,
    accept_coins: torch.Tensor,
    final_coins: torch.Tensor,
) -> VerifyResult:
    """Accept or replace candidates so that every emitted token has exactly the target's distribution.

    Speculative sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023). Candidate x, drawn from q, is
    accepted with probability min(1, p(x) / q(x)); the first one refused is replaced by a draw from
    max(p - q, 0), renormalised. A token x then comes out with probability min(p(x), q(x)) as a candidate
    and max(p(x) - q(x), 0) as a replacement, p(x) in all. After `prop_len` accepted candidates the next token
    is drawn from p itself. If p and q are equal up to rounding there may be a refusal but no residual; then
    p takes its place.

    Exact only if each candidate was drawn from its q, and coins are independent of that draw and of each
    other. Row n needs `final_coins` that it uses in no other round.

    Args:
        proposal: candidates and their q; filler columns may hold anything.
        target_probs: `[N, B, V]` fp32, column j is p after candidates 1..j.
        accept_coins: `[N, B-1]` in [0, 1), one for each candidate.
        final_coins: `[N]` in [0, 1), for the token after the last accepted candidate.

    Returns:
        `out_tokens` is the candidates, then the bonus at `accept_len`; fillers are valid ids.
    """
    width = proposal.tokens.shape[1]
    row = torch.arange(proposal.tokens.shape[0], device=proposal.tokens.device)
    column = torch.arange(width, device=proposal.tokens.device)
    real = column < proposal.prop_len[:, None]  # [N, B-1]
    tokens = torch.where(real, proposal.tokens, 0)  # fillers may be no ids at all
    support_ids, support_probs = proposal.support_ids, proposal.support_probs
    is_drafted = support_ids == proposal.tokens[:, :, None]  # [N, B-1, K]
    drafted_q = torch.where(is_drafted, support_probs, 0.0).sum(dim=-1)  # [N, B-1]
    drafted_p = target_probs[:, :-1].gather(2, tokens[:, :, None]).squeeze(2)  # [N, B-1]
    accepted = (accept_coins * drafted_q < drafted_p) & real
    accept_len = accepted.to(torch.int64).cumprod(dim=1).sum(dim=1)  # [N]

    refused = (accept_len < proposal.prop_len)[:, None]  # [N, 1]
    at = accept_len.clamp(max=width - 1)
    last_p = target_probs[row, accept_len]  # [N, V]
    # Where nothing was refused, nothing is taken off p.
    last_ids = torch.where(refused, support_ids[row, at], 0)  # [N, K]
    last_q = torch.where(refused, support_probs[row, at], 0.0)
    residual = last_p.scatter_add(1, last_ids, -last_q).clamp(min=0)  # [N, V]
    has_mass = residual.amax(dim=1, keepdim=True) > 0
    bonus = _draw(torch.where(has_mass, residual, last_p), final_coins)
    out_tokens = torch.nn.functional.pad(tokens, (0, 1)).scatter(1, accept_len[:, None], bonus[:, None])
    return VerifyResult(out_tokens=out_tokens, accept_len=accept_len, bonus=bonus)


def _truncated(
    probs: torch.Tensor, *, top_ks: torch.Tensor | None, top_ps: torch.Tensor | None
) -> torch.Tensor:
    """`probs` `[N, M, V]` with 0 where top_k or top_p drops a token, not renormalised."""
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered  # [N, M, V] what comes before each token, together
    if top_ps is not None:
        ordered = torch.where(before > top_ps[:, None, None], 0.0, ordered)
    if top_ks is not None:
        rank = torch.arange(probs.shape[-1], device=probs.device)
        ordered = torch.where(rank >= top_ks[:, None, None], 0.0, ordered)
    return torch.zeros_like(probs).scatter(-1, ids, ordered)


def _draw(weights: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """One token of each row of `weights` `[N, V]`, by inverting the distribution function at `coins` `[N]`.

    Sums are fp64: in fp32 their rounding would be as large as the probability of a rare token. A parallel sum
    may still grow by rounding where the weight is 0, so such tokens are ruled out by themselves.
    """
    cumulative = weights.double().cumsum(dim=1)
    above = cumulative > coins[:, None] * cumulative[:, -1:]
    return (above & (weights > 0)).to(torch.uint8).argmax(dim=1)  # the first one
