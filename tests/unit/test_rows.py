"""Drafting of request rows with real networks, against a forward of the whole sequence from scratch.

The reference is `reference.block_logits`: one dense mask, no cache, no rows. Every draft is checked, so a
token that is missing from a row's cache, is there twice or was never accepted shows as a wrong candidate.

Legend: N rows, B block size.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from d3d_sglang.drafter import executor as executor_module
from d3d_sglang.drafter.executor import DrafterExecutor
from d3d_sglang.drafter.kv_cache import CacheShape, PagedCache
from d3d_sglang.drafter.model import DrafterModel
from d3d_sglang.drafter.page_pool import PagePool
from d3d_sglang.drafter.rows import DrafterRows, RowBatch
from d3d_sglang.reference import block_logits
from d3d_sglang.spec_types import DraftProposal
from tests.tiny import MASK_TOKEN_ID, VOCAB_SIZE, WEIGHT_STD, tiny_llama

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_ROWS = 5
PAGE_SIZE = 4
SUPPORT = 8
# The same fp32 forward with its sums in another order; logits are below 20. A candidate may differ from the
# reference's only where it is that close to the best.
TIE = 1e-4
DRAFTED = BLOCK_SIZE - 1


def tiny_qwen3(seed: int) -> Qwen3ForCausalLM:
    """Like `tiny_llama`, with Qwen3's normalised queries and keys and tied embeddings."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=WEIGHT_STD,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class Network:
    """A drafter in both forms: loaded by our code, and as the slow reference."""

    model: DrafterModel
    reference: Callable[[list[int]], torch.Tensor]  # tokens -> [B-1, V]

    def rows(
        self, *, max_positions: int = 2000, max_length: int = 2000, num_pages: int = 1000
    ) -> DrafterRows:
        """Rows that read a block a round after it was verified, as synchronous drafting does."""
        model = self.model
        shape = CacheShape(
            num_layers=model.num_layers,
            num_rows=NUM_ROWS,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_length=max_length,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=torch.float32,
        )
        executor = DrafterExecutor(
            model,
            PagedCache(shape, CPU),
            block_size=BLOCK_SIZE,
            mask_token_id=MASK_TOKEN_ID,
            support=SUPPORT,
        )
        pool = PagePool(num_pages=num_pages, page_size=PAGE_SIZE, num_rows=NUM_ROWS)
        return DrafterRows(executor, pool, max_positions=max_positions, packed=False)

    def assert_drafts(self, tokens: list[int], candidates: list[int]) -> None:
        """`candidates` are the most likely tokens after `tokens`, whose last one is the anchor."""
        logits = self.reference(tokens)
        chosen = logits.gather(1, torch.tensor(candidates)[:, None]).squeeze(1)
        gap = logits.max(dim=1).values - chosen
        assert (gap <= TIE).all(), f"{candidates} are not {logits.argmax(dim=1).tolist()}, by {gap.tolist()}"


@pytest.fixture(scope="module", params=[tiny_llama, tiny_qwen3])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Network:
    path: Path = tmp_path_factory.mktemp("drafter")
    request.param(1).save_pretrained(path)
    model = DrafterModel(
        path, mask_token_id=MASK_TOKEN_ID, vocab_size=VOCAB_SIZE, device=CPU, dtype=torch.float32
    )
    plain = request.param(1)
    return Network(model, block_logits(plain, block_size=BLOCK_SIZE, mask_token_id=MASK_TOKEN_ID))


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, MASK_TOKEN_ID, (length,), generator=generator).tolist()


class Decoding:
    """Rows that decode: the tokens each really has, the last being its anchor."""

    def __init__(self, rows: DrafterRows) -> None:
        self.rows = rows
        self.tokens: dict[int, list[int]] = {}
        self._generation = 0

    def start(self, row: int, tokens: Sequence[int], *, anchor: int = 7, prefix_len: int = 0) -> str | None:
        self._generation += 1
        self.tokens[row] = [*tokens, anchor]
        return self.rows.extend(row, tokens, prefix_len=prefix_len, generation=self._generation)

    def batch(self, *rows: int) -> RowBatch:
        committed = [len(self.tokens[row]) - 1 for row in rows]
        return RowBatch(
            rows=torch.tensor(rows),
            anchor=torch.tensor([self.tokens[row][-1] for row in rows]),
            committed_len=torch.tensor(committed),
            bound=max(committed) + BLOCK_SIZE,  # an upper bound, as the host's is
            sampling=None,
        )

    def draft(self, *rows: int) -> DraftProposal:
        for row in rows:
            self.rows.reserve(row, host_len=len(self.tokens[row]))
        return self.rows.draft(self.batch(*rows))

    def commit(self, *rows: int, proposal: DraftProposal, accept_lens: Sequence[int], bonus: int = 9) -> None:
        anchors = torch.tensor([[self.tokens[row][-1]] for row in rows])
        block = torch.cat([anchors, proposal.tokens], dim=1)
        self.rows.commit(self.batch(*rows), block, accept_len=torch.tensor(accept_lens))
        for i, row in enumerate(rows):
            self.tokens[row] += [
                *proposal.tokens[i, : accept_lens[i]].tolist(),
                (bonus + row) % MASK_TOKEN_ID,
            ]


def assert_round(
    network: Network, decoding: Decoding, rows: Sequence[int], accept_lens: Sequence[int]
) -> None:
    """Draft, compare with the reference, commit."""
    proposal = decoding.draft(*rows)
    assert proposal.prop_len.tolist() == [DRAFTED] * len(rows)
    assert torch.equal(proposal.support_ids[:, :, 0], proposal.tokens), "the candidate is not the likeliest"
    certain = torch.zeros(len(rows), DRAFTED, SUPPORT)
    certain[:, :, 0] = 1
    assert torch.equal(proposal.support_probs, certain), "greedy drafts are point masses"
    for row, candidates in zip(rows, proposal.tokens.tolist(), strict=True):
        network.assert_drafts(decoding.tokens[row], candidates)
    decoding.commit(*rows, proposal=proposal, accept_lens=accept_lens)


def test_ragged_rows_draft_as_the_reference_does(network: Network) -> None:
    decoding = Decoding(network.rows())
    lengths = {1: 1, 3: 23, 4: 11}
    for row, length in lengths.items():
        decoding.start(row, prompt(length))
    rows = tuple(lengths)
    for i in range(2 * BLOCK_SIZE):
        assert_round(network, decoding, rows, [(i + n) % BLOCK_SIZE for n in range(len(rows))])


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_interleaving_of_rows_drafts_as_the_reference_does(network: Network, data: st.DataObject) -> None:
    decoding = Decoding(network.rows())
    rows = range(1, NUM_ROWS)
    for row in rows:
        decoding.start(row, prompt(data.draw(st.integers(1, 12)), seed=row))
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.integers(0, 3)) == 0:  # a new request takes over a row
            row = data.draw(st.sampled_from(rows))
            decoding.start(row, prompt(data.draw(st.integers(1, 12)), seed=9))
        batch = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))
        accept_lens = data.draw(st.lists(st.integers(0, DRAFTED), min_size=len(batch), max_size=len(batch)))
        assert_round(network, decoding, batch, accept_lens)


def test_a_batch_of_rows_drafts_what_each_drafts_alone(network: Network) -> None:
    lengths = {1: 3, 2: 40, 3: 17, 4: 9}
    together = Decoding(network.rows())
    for row, length in lengths.items():
        together.start(row, prompt(length))
    for i in range(4):
        accept_lens = [(row + i) % BLOCK_SIZE for row in lengths]
        assert_round(network, together, tuple(lengths), accept_lens)
    for row, length in lengths.items():
        alone = Decoding(network.rows())
        alone.start(row, prompt(length))
        for i in range(4):
            assert_round(network, alone, (row,), [(row + i) % BLOCK_SIZE])
        assert alone.tokens[row] == together.tokens[row]


@pytest.mark.parametrize("chunk", [1, 7, 600])
def test_chunks_of_a_prompt_are_read_as_the_whole(network: Network, chunk: int) -> None:
    tokens = prompt(13 if chunk == 1 else 2 * chunk + 5)
    rows = network.rows()
    read = _count_reads(rows)
    decoding = Decoding(rows)
    decoding.tokens[2] = [*tokens, 7]
    for start in range(0, len(tokens), chunk):
        rows.extend(2, array("q", tokens[: start + chunk]), prefix_len=start, generation=1)
    assert sum(read) == len(tokens), "a chunk that continues reads its own tokens only"
    assert rows.pool.stats().recomputed_tokens == len(tokens), "every chunk is counted"
    assert_round(network, decoding, (2,), [2])
    assert_round(network, decoding, (2,), [0])


@pytest.mark.parametrize("length", [511, 512, 513, 1030])
def test_a_prompt_longer_than_a_pass_is_read_in_several(network: Network, length: int) -> None:
    assert executor_module.PREFILL_CHUNK == 512
    decoding = Decoding(network.rows())
    decoding.start(1, prompt(length))
    assert_round(network, decoding, (1,), [3])
    assert_round(network, decoding, (1,), [1])


def test_a_new_request_in_a_row_is_read_from_its_start(network: Network) -> None:
    rows = network.rows()
    decoding = Decoding(rows)
    decoding.start(1, prompt(20, seed=1))
    assert_round(network, decoding, (1,), [3])
    read = _count_reads(rows)
    # The target has 20 tokens of it cached, as many as the drafter read of the request before.
    decoding.start(1, prompt(25, seed=2), prefix_len=20)
    assert sum(read) == 25
    assert_round(network, decoding, (1,), [2])


@pytest.mark.parametrize("prefix_len", [0, 8, 22])
def test_a_request_that_comes_back_is_read_from_its_pages_on(network: Network, prefix_len: int) -> None:
    rows = network.rows()
    decoding = Decoding(rows)
    tokens = prompt(20)
    decoding.start(1, tokens)
    assert_round(network, decoding, (1,), [3])
    read = _count_reads(rows)
    again = [*decoding.tokens[1]]
    # Same generation, but its prefix is not where the last chunk ended.
    rows.extend(1, again, prefix_len=prefix_len, generation=1)
    assert sum(read) == len(again) - len(tokens) // PAGE_SIZE * PAGE_SIZE, "pages of the prompt are reused"
    decoding.tokens[1] = [*again, 3]
    assert_round(network, decoding, (1,), [1])


def test_rejected_candidates_leave_nothing_behind(network: Network) -> None:
    drafts = []
    for rejected in (0, 11, 30):
        decoding = Decoding(network.rows())
        decoding.start(1, prompt(9))
        proposal = decoding.draft(1)
        tokens = proposal.tokens.clone()
        tokens[:, 1:] = rejected
        decoding.commit(1, proposal=replace(proposal, tokens=tokens), accept_lens=[1])
        after = [decoding.draft(1)]
        decoding.commit(1, proposal=after[0], accept_lens=[0])
        after.append(decoding.draft(1))
        drafts.append([p.tokens.tolist() for p in after])
        network.assert_drafts(decoding.tokens[1], after[1].tokens[0].tolist())
    assert drafts[0] == drafts[1] == drafts[2]


def test_candidates_are_never_the_mask_or_a_padding_token(network: Network) -> None:
    model = network.model
    hidden = torch.randn(200, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    assert (model.logits(hidden)[:, MASK_TOKEN_ID] == float("-inf")).all()
    assert torch.isfinite(model.logits(hidden)[:, :MASK_TOKEN_ID]).all()


def test_a_prompt_may_contain_the_mask_token(network: Network) -> None:
    decoding = Decoding(network.rows())
    tokens = prompt(9)
    tokens[4] = MASK_TOKEN_ID
    decoding.start(1, tokens, anchor=MASK_TOKEN_ID)
    assert_round(network, decoding, (1,), [1])
    assert_round(network, decoding, (1,), [3])


def assert_plain_until_extended(network: Network, decoding: Decoding, row: int, other: int) -> None:
    """`row` gets no drafts for some rounds while `other` does; a new request in `row` gets them again."""
    for _ in range(3):
        proposal = decoding.draft(row, other)
        assert proposal.prop_len.tolist() == [0, DRAFTED]
        network.assert_drafts(decoding.tokens[other], proposal.tokens[1].tolist())
        decoding.commit(row, other, proposal=proposal, accept_lens=[0, 2])
    decoding.start(row, prompt(6))
    assert_round(network, decoding, (row, other), [1, 1])


def test_a_skipped_row_gets_no_drafts_until_it_is_extended(network: Network) -> None:
    decoding = Decoding(network.rows())
    for row in (1, 2):
        decoding.start(row, prompt(10, seed=row))
    assert_round(network, decoding, (1, 2), [2, 2])
    decoding.rows.skip(1)
    assert_plain_until_extended(network, decoding, row=1, other=2)


def test_a_row_skipped_before_it_was_ever_read_gets_no_drafts(network: Network) -> None:
    decoding = Decoding(network.rows())
    decoding.rows.skip(1)
    decoding.tokens[1] = [*prompt(10), 7]
    decoding.start(2, prompt(5))
    assert_plain_until_extended(network, decoding, row=1, other=2)


def test_cleared_rows_get_no_drafts_until_they_are_extended(network: Network) -> None:
    decoding = Decoding(network.rows())
    for row in (1, 2):
        decoding.start(row, prompt(10, seed=row))
    assert_round(network, decoding, (1, 2), [2, 2])
    decoding.rows.clear()
    decoding.start(2, prompt(4))
    assert_plain_until_extended(network, decoding, row=1, other=2)


def test_a_round_the_drafter_missed_costs_drafts_and_nothing_else(network: Network) -> None:
    decoding = Decoding(network.rows())
    for row in (1, 2):
        decoding.start(row, prompt(10, seed=row))
    assert_round(network, decoding, (1, 2), [2, 2])
    decoding.tokens[1] += [4, 4]  # committed without a draft
    assert_plain_until_extended(network, decoding, row=1, other=2)


@pytest.mark.parametrize(("length", "fits"), [(26, True), (27, False), (200, False)])
def test_a_prompt_must_leave_room_for_a_block(network: Network, length: int, fits: bool) -> None:
    rows = network.rows(max_positions=26 + BLOCK_SIZE, max_length=100)
    read = _count_reads(rows)
    decoding = Decoding(rows)
    assert decoding.start(1, prompt(length)) == (None if fits else "too_long")
    assert sum(read) == (length if fits else 0)
    decoding.start(2, prompt(5))
    proposal = decoding.draft(1, 2)
    assert proposal.prop_len.tolist() == [DRAFTED if fits else 0, DRAFTED]
    network.assert_drafts(decoding.tokens[2], proposal.tokens[1].tolist())


def test_a_row_that_outgrows_the_drafter_loses_its_drafts_and_harms_nobody(network: Network) -> None:
    limit = 20
    rows = network.rows(max_positions=limit, max_length=limit + 3 * BLOCK_SIZE)
    decoding = Decoding(rows)
    decoding.start(1, prompt(10))
    for _ in range(30):  # far past its pages
        committed = len(decoding.tokens[1]) - 1
        decoding.start(2, prompt(8))
        proposal = decoding.draft(1, 2)
        inside = committed + BLOCK_SIZE <= limit
        assert proposal.prop_len.tolist() == [DRAFTED if inside else 0, DRAFTED]
        network.assert_drafts(decoding.tokens[2], proposal.tokens[1].tolist())
        if inside:
            network.assert_drafts(decoding.tokens[1], proposal.tokens[0].tolist())
        decoding.commit(1, 2, proposal=proposal, accept_lens=[1 if inside else 0, 0])
    assert len(decoding.tokens[1]) > rows.executor.cache.shape.max_length


def _count_reads(rows: DrafterRows) -> list[int]:
    """Numbers of tokens that prefills read from now on."""
    counts: list[int] = []
    prefill = rows.executor.prefill

    def counted(row: int, token_ids: Sequence[int], **kwargs: Any) -> None:
        counts.append(len(token_ids))
        prefill(row, token_ids, **kwargs)

    rows.executor.prefill = counted  # type: ignore[method-assign]
    return counts
