"""A packed pass against every one of its blocks read alone, from scratch, under a dense mask.

The reference is `reference.block_logits`: the whole sequence in one forward of the transformers model,
without cache, pages or other blocks.

Legend: N rows, B block size, V vocabulary, R branches, C coverage, F fanout, K support size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from d3d_sglang.branch.planner import BranchPlanner
from d3d_sglang.drafter.executor import BlockRequest, DrafterExecutor
from d3d_sglang.drafter.kv_cache import CacheShape, PagedCache
from d3d_sglang.drafter.model import DrafterModel
from d3d_sglang.drafter.page_pool import PagePool
from d3d_sglang.drafter.rows import DrafterRows
from d3d_sglang.reference import block_logits
from d3d_sglang.spec_types import BranchSet, DraftProposal
from tests.tiny import MASK_TOKEN_ID, VOCAB_SIZE, tiny_llama

CPU = torch.device("cpu")
NUM_ROWS, PAGE_SIZE, SUPPORT, MAX_LENGTH = 6, 4, 8, 160
# Of the largest logit. fp32 rounds by 6e-8; sums of up to 130 terms, here in the order of a cached prefix and
# a window of 384 tokens, there of one sequence, in two layers. A token that sees one key too many or too few
# is off by 1e-3 and more.
RTOL = 1e-5


@dataclass(frozen=True)
class Network:
    """One drafter in both forms."""

    model: DrafterModel
    plain: torch.nn.Module

    def rows(self, block_size: int) -> DrafterRows:
        shape = CacheShape(
            num_layers=2,
            num_rows=NUM_ROWS,
            num_pages=300,
            page_size=PAGE_SIZE,
            max_length=MAX_LENGTH,
            num_kv_heads=2,
            head_dim=8,
            dtype=torch.float32,
        )
        executor = DrafterExecutor(
            self.model,
            PagedCache(shape, CPU),
            block_size=block_size,
            mask_token_id=MASK_TOKEN_ID,
            support=SUPPORT,
        )
        pool = PagePool(num_pages=300, page_size=PAGE_SIZE, num_rows=NUM_ROWS)
        return DrafterRows(executor, pool, max_positions=MAX_LENGTH, packed=True)

    def alone(self, block_size: int) -> Callable[[list[int]], torch.Tensor]:
        """Tokens, the last one the anchor -> logits `[B-1, V]`."""
        return block_logits(self.plain, block_size=block_size, mask_token_id=MASK_TOKEN_ID)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    path: Path = tmp_path_factory.mktemp("drafter")
    tiny_llama(1).save_pretrained(path)
    model = DrafterModel(
        path, mask_token_id=MASK_TOKEN_ID, vocab_size=VOCAB_SIZE, device=CPU, dtype=torch.float32
    )
    return Network(model, tiny_llama(1))


@dataclass(frozen=True)
class Pass:
    """Rows in the middle of decoding: what each has read, and the block being verified."""

    planner: BranchPlanner
    texts: list[list[int]]  # committed tokens before the anchor, by row
    block: torch.Tensor  # [N, B]
    branches: BranchSet

    @classmethod
    def make(cls, planner: BranchPlanner, lengths: list[int], *, prop_lens: list[int], seed: int = 0) -> Pass:
        generator = torch.Generator().manual_seed(seed)

        def tokens(*shape: int) -> torch.Tensor:
            return torch.randint(0, MASK_TOKEN_ID, shape, generator=generator)

        texts = [tokens(length).tolist() for length in lengths]
        block = tokens(len(lengths), planner.block_size)
        shape = (len(lengths), planner.block_size - 1, MASK_TOKEN_ID)
        support_ids = torch.rand(*shape, generator=generator).argsort(dim=2)[:, :, :SUPPORT]
        probs = torch.ones(support_ids.shape)
        proposal = DraftProposal(block[:, 1:], torch.tensor(prop_lens), support_ids, probs)
        return cls(planner, texts, block, planner.plan(block, proposal))

    def packed_logits(self, rows: DrafterRows) -> torch.Tensor:
        """Logits `[N, R, B-1, V]` of the packed pass; the rows have read their texts before."""
        index = torch.arange(1, len(self.texts) + 1)
        for row, text in zip(index.tolist(), self.texts, strict=True):
            assert rows.extend(row, text, prefix_len=0, generation=row) is None
        prefix_len = torch.tensor([len(text) for text in self.texts])
        request = BlockRequest(
            rows=index,
            prefix_len=prefix_len,
            known=self.block,
            anchors=self.branches.anchor,
            context_len=prefix_len[:, None] + self.branches.context_offset,
            max_prefix=int(prefix_len.max()) + 3,
        )
        return logits_of(rows.executor, request)

    def branch_tokens(self, row: int, branch: int) -> list[int]:
        """All tokens a branch builds on, its anchor last."""
        known = self.block[row, : int(self.branches.context_offset[row, branch])].tolist()
        return [*self.texts[row], *known, int(self.branches.anchor[row, branch])]

    def assert_packed(self, network: Network) -> None:
        packed = self.packed_logits(network.rows(self.planner.block_size))
        alone = network.alone(self.planner.block_size)
        for row in range(len(self.texts)):
            for branch in range(self.planner.num_branches):
                assert_close(packed[row, branch], alone(self.branch_tokens(row, branch)))


def logits_of(executor: DrafterExecutor, request: BlockRequest) -> torch.Tensor:
    """Logits `[N, R, B-1, V]` of a pass, which `draft` does not return."""
    inputs = executor.prepare(request)
    hidden = executor.forward(
        inputs, executor.plan(request.rows, inputs.layout, max_prefix=request.max_prefix)
    )
    blocks = hidden[:, request.known.shape[1] :].unflatten(1, (-1, executor.block_size))
    return executor.model.logits(blocks[:, :, 1:])


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    real = expected.isfinite()
    assert torch.equal(found.isfinite(), real), "other tokens are ruled out"
    scale = float(expected[real].abs().max())
    error = float((found[real] - expected[real]).abs().max())
    assert error <= RTOL * scale, f"off by {error / scale:.1e} of the largest logit"


FULL_GRID = BranchPlanner(block_size=16, coverage=12, fanout=2)


@pytest.mark.parametrize(
    ("lengths", "prop_lens"), [([37], [15]), ([37], [14]), ([1, 70, 16, 33, 4], [15, 14, 15, 0, 6])]
)
def test_every_branch_of_the_papers_grid_drafts_what_it_drafts_alone(
    network: Network, lengths: list[int], prop_lens: list[int]
) -> None:
    Pass.make(FULL_GRID, lengths, prop_lens=prop_lens).assert_packed(network)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_grid_over_any_rows_drafts_what_each_block_drafts_alone(
    network: Network, data: st.DataObject
) -> None:
    block_size = data.draw(st.integers(2, 6))
    planner = BranchPlanner(block_size, data.draw(st.integers(1, block_size)), data.draw(st.integers(1, 3)))
    lengths = data.draw(st.lists(st.integers(1, 25), min_size=1, max_size=4))
    prop_lens = [data.draw(st.integers(0, block_size - 1)) for _ in lengths]
    Pass.make(planner, lengths, prop_lens=prop_lens, seed=data.draw(st.integers(0, 99))).assert_packed(
        network
    )


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_contexts_of_any_blocks(network: Network, data: st.DataObject) -> None:
    """Branch sets no planner makes: contexts in any order, also ones that end inside the cached prefix."""
    block_size, num_known = data.draw(st.integers(2, 5)), data.draw(st.integers(0, 6))
    text = torch.randint(0, MASK_TOKEN_ID, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    prefix = data.draw(st.integers(1, 20))
    contexts = data.draw(st.lists(st.integers(0, prefix + num_known), min_size=1, max_size=6))
    anchors = data.draw(
        st.lists(st.integers(0, MASK_TOKEN_ID - 1), min_size=len(contexts), max_size=len(contexts))
    )
    rows = network.rows(block_size)
    rows.extend(2, text[:prefix], prefix_len=0, generation=1)
    request = BlockRequest(
        rows=torch.tensor([2]),
        prefix_len=torch.tensor([prefix]),
        known=torch.tensor([text[prefix : prefix + num_known]], dtype=torch.int64),
        anchors=torch.tensor([anchors]),
        context_len=torch.tensor([contexts]),
        max_prefix=prefix + data.draw(st.integers(0, 9)),
    )
    packed = logits_of(rows.executor, request)
    for branch, (context, anchor) in enumerate(zip(contexts, anchors, strict=True)):
        assert_close(packed[0, branch], network.alone(block_size)([*text[:context], anchor]))


def test_a_draft_takes_the_most_likely_tokens_of_those_logits(network: Network) -> None:
    case = Pass.make(BranchPlanner(5, 3, 2), [9, 4], prop_lens=[4, 3])
    packed = case.packed_logits(network.rows(5))
    rows = network.rows(5)
    index = torch.tensor([1, 2])
    prefix_len = torch.tensor([9, 4])
    for row, text in zip(index.tolist(), case.texts, strict=True):
        rows.extend(row, text, prefix_len=0, generation=row)
    context_len = prefix_len[:, None] + case.branches.context_offset
    request = BlockRequest(index, prefix_len, case.block, case.branches.anchor, context_len, max_prefix=9)
    drafts = rows.executor.draft(request, None)
    assert torch.equal(drafts.tokens, packed.argmax(dim=-1))
    assert torch.equal(drafts.support_ids, packed.topk(SUPPORT).indices)
    assert torch.equal(drafts.support_probs.sum(dim=-1), torch.ones(drafts.tokens.shape))


@pytest.mark.parametrize("num_shared", [4, 16, 20])
def test_pages_that_are_found_draft_as_pages_that_are_made(network: Network, num_shared: int) -> None:
    """Warm and cold give the same candidates and the same next likely ones, exactly."""
    text = torch.randint(0, MASK_TOKEN_ID, (22,), generator=torch.Generator().manual_seed(3)).tolist()
    other = [*text[:num_shared], *reversed(text)]  # goes on otherwise
    case = Pass.make(BranchPlanner(4, 4, 2), [22], prop_lens=[3])
    cold = Pass(case.planner, [text], case.block, case.branches)
    rows = network.rows(4)
    rows.extend(3, other, prefix_len=0, generation=9)
    found, expected = cold.packed_logits(rows), cold.packed_logits(network.rows(4))
    assert rows.pool.stats().shared_tokens == num_shared
    assert_close(found, expected)
    assert torch.equal(found.topk(SUPPORT).indices, expected.topk(SUPPORT).indices)


def test_the_same_prompt_again_reads_the_same_keys_and_values(network: Network) -> None:
    """The pages found are the very ones the first request made: equal to the last bit."""
    case = Pass.make(BranchPlanner(4, 4, 2), [20], prop_lens=[3])
    rows = network.rows(4)
    first = case.packed_logits(rows)
    again = case.packed_logits(rows)  # the row begins anew
    assert rows.pool.stats().shared_tokens == 20
    assert torch.equal(first, again)
