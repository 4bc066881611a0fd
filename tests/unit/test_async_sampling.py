"""Sampled asynchronous decoding emits exactly the target's distribution, whatever a proposal's origin.

The drafting side is the real one (rows, packed pass, branches, selector, store); the target is a Markov chain
and the drafter's network is replaced by that chain's marginals, so tens of thousands of tokens take seconds.
Rounds are grouped by the ORIGIN of their proposal, which is known before the verification: a correct sampler
fails a grouping by outcome.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
import torch

from d3d_sglang.branch.planner import BranchPlanner
from d3d_sglang.coins import ACCEPT, RESIDUAL, uniform
from d3d_sglang.drafter.attention import WindowPlan
from d3d_sglang.drafter.executor import DrafterExecutor, DraftSampling
from d3d_sglang.drafter.kv_cache import CacheShape, PagedCache
from d3d_sglang.drafter.page_pool import PagePool
from d3d_sglang.drafter.rows import DrafterRows, RowBatch
from d3d_sglang.drafting import Drafting
from d3d_sglang.proposals import ProposalStore
from d3d_sglang.spec_types import DraftProposal, Origin
from d3d_sglang.verify.sampling import filtered_probs, reject_sample
from tests.unit.chi_square import p_value

VOCAB, MASK, BLOCK, SUPPORT = 32, 31, 3, 12
ROWS, ROUNDS, MAX_LENGTH = 512, 340, 1_100
CPU = torch.device("cpu")
# Fixed seeds make the test repeatable; a correct sampler fails one group in a hundred at this bound.
SIGNIFICANCE = 0.01
TOKENS_PER_ORIGIN = 20_000


def markov_chain() -> torch.Tensor:
    """`[V, V]`: each token has three likely successors and a tail; nothing leads to the mask token."""
    generator = torch.Generator().manual_seed(7)
    probs = 0.12 * torch.rand(VOCAB, VOCAB, generator=generator, dtype=torch.float64).softmax(dim=1)
    for likely in (0.6, 0.18, 0.1):
        probs[torch.arange(VOCAB), torch.randperm(VOCAB, generator=generator)] += likely
    probs[:, MASK] = 0
    return probs / probs.sum(dim=1, keepdim=True)


class MarginalModel:
    """Stands for a drafter's network: masked position j of a block gets the chain's marginal j steps on."""

    device = CPU

    def __init__(self, chain: torch.Tensor) -> None:
        powers = [torch.linalg.matrix_power(chain, j) for j in range(1, BLOCK)]
        self._marginals = torch.stack([torch.eye(VOCAB, dtype=chain.dtype), *powers])  # [B, V, V]

    def hidden(
        self, token_ids: torch.Tensor, *, position_ids: torch.Tensor, plan: WindowPlan
    ) -> torch.Tensor:
        index = torch.arange(token_ids.shape[1]).expand_as(token_ids)
        anchor = (
            torch.where(token_ids == MASK, 0, index).cummax(dim=1).values
        )  # the token a block starts with
        distance = (index - anchor).clamp(max=BLOCK - 1)
        return self._marginals[distance, token_ids.gather(1, anchor)].float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.log()


def make_drafting(chain: torch.Tensor, *, miss: str) -> Drafting:
    shape = CacheShape(
        num_layers=1,
        num_rows=ROWS,
        num_pages=ROWS * MAX_LENGTH // 16,
        page_size=16,
        max_length=MAX_LENGTH,
        num_kv_heads=1,
        head_dim=1,
        dtype=torch.float32,
    )
    model: object = MarginalModel(chain)
    executor = DrafterExecutor(
        model,  # type: ignore[arg-type]
        PagedCache(shape, CPU),
        block_size=BLOCK,
        mask_token_id=MASK,
        support=SUPPORT,
    )
    pool = PagePool(num_pages=shape.num_pages, page_size=16, num_rows=ROWS)
    rows = DrafterRows(executor, pool, max_positions=MAX_LENGTH, packed=True)
    store = ProposalStore(num_rows=ROWS, block_size=BLOCK, support=SUPPORT, device=CPU)
    planner = BranchPlanner(block_size=BLOCK, coverage=BLOCK, fanout=3)
    return Drafting(rows, store, device=CPU, planner=planner, sibling=miss == "sibling")


def decode(miss: str, *, rounds: int, spoil: bool = False) -> dict[Origin, tuple[list[int], list[int]]]:
    """Emitted tokens and the token before each, by origin of the proposal that was verified.

    `spoil` claims another distribution for the drafts than the one they were drawn from.
    """
    chain = markov_chain()
    drafting = make_drafting(chain, miss=miss)
    generator = torch.Generator().manual_seed(3)
    rows = torch.arange(ROWS)
    seeds = torch.randint(2**62, (ROWS,), generator=generator)
    sampling = DraftSampling(torch.ones(ROWS), torch.zeros(ROWS, dtype=torch.bool), seeds)
    prompts = torch.randint(MASK, (ROWS, 5), generator=generator)
    for row in rows.tolist():
        drafting.extend(row, prompts[row].tolist(), prefix_len=0, generation=0)
    anchor, committed = torch.randint(MASK, (ROWS,), generator=generator), torch.full((ROWS,), 5)
    emitted: dict[Origin, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for _ in range(rounds):
        length = int(committed.max())
        for row in rows.tolist():
            drafting.rows.reserve(row, host_len=length)
        batch = RowBatch(rows, anchor, committed, length, sampling)
        origins = drafting._store.origins(rows.tolist())
        proposal = drafting.propose(batch, rows.tolist())
        block = torch.cat([anchor[:, None], proposal.tokens], dim=1)
        ahead = drafting.draft_ahead(batch, block, proposal)
        logits = chain[block].log().float()  # [N, B, V]
        probs = filtered_probs(
            logits, temperatures=torch.ones(ROWS, 1), top_ks=None, top_ps=None, min_ps=None
        )
        positions = committed[:, None] + torch.arange(1, BLOCK)
        verify = reject_sample(
            _flattened(proposal) if spoil else proposal,
            probs,
            accept_coins=uniform(seeds, positions, stream=ACCEPT),
            final_coins=uniform(seeds, committed, stream=RESIDUAL),
        )
        drafting.resolve(batch, block, ahead, verify)
        out = torch.cat([anchor[:, None], verify.out_tokens], dim=1).tolist()
        for origin, tokens, accepted in zip(origins, out, verify.accept_len.tolist(), strict=True):
            emitted[origin][0].extend(tokens[: accepted + 1])
            emitted[origin][1].extend(tokens[1 : accepted + 2])
        anchor, committed = verify.bonus, committed + verify.accept_len + 1
    return emitted


def _flattened(proposal: DraftProposal) -> DraftProposal:
    return dataclasses.replace(proposal, support_probs=proposal.support_probs.sqrt())


def group_p_value(group: tuple[list[int], list[int]]) -> float:
    context, tokens = (np.array(part) for part in group)
    return p_value(tokens, markov_chain().numpy()[context])


@pytest.mark.parametrize(
    ("miss", "origins"),
    [
        ("redraft", (Origin.HIT, Origin.FULL, Origin.REDRAFT)),
        ("sibling", (Origin.HIT, Origin.FULL, Origin.SIBLING)),
    ],
)
def test_every_origin_has_the_targets_distribution(miss: str, origins: tuple[Origin, ...]) -> None:
    emitted = decode(miss, rounds=ROUNDS)
    for origin in origins:
        assert len(emitted[origin][1]) >= TOKENS_PER_ORIGIN, (origin, len(emitted[origin][1]))
        assert group_p_value(emitted[origin]) > SIGNIFICANCE, origin


def test_a_wrong_draft_distribution_is_noticed() -> None:
    emitted = decode("redraft", rounds=ROUNDS, spoil=True)
    assert min(group_p_value(group) for group in emitted.values()) < 1e-6
