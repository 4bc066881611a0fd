"""Rows that decode with the real drafting side and a small target, round by round, without SGLang.

By default both are networks of the same weights, large and with tied embeddings, so that a block drafter is
right often enough. They run in fp64: the order of sums then never decides between two tokens, and what is
compared with `reference.py` is equal.

Legend: N rows, B block size, C coverage, F fanout.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from transformers import LlamaForCausalLM

from d3d_sglang.branch.planner import BranchPlanner
from d3d_sglang.drafter.executor import DrafterExecutor
from d3d_sglang.drafter.kv_cache import CacheShape, PagedCache
from d3d_sglang.drafter.model import DrafterModel
from d3d_sglang.drafter.page_pool import PagePool
from d3d_sglang.drafter.rows import DrafterRows, RowBatch
from d3d_sglang.drafting import Drafting
from d3d_sglang.proposals import ProposalStore
from d3d_sglang.reference import LogitsOf, Method, Round, block_logits, target_logits
from d3d_sglang.verify.accept import accept_block
from tests.tiny import tiny_llama

CPU = torch.device("cpu")
VOCAB_SIZE, MASK_TOKEN_ID = 24, 23
NUM_ROWS, NUM_PAGES, PAGE_SIZE, SUPPORT = 6, 200, 4, 8


class Source(Protocol):
    """A target and a drafter."""

    @property
    def target(self) -> LogitsOf: ...

    def logits(self, block_size: int) -> LogitsOf:
        """The drafter as `reference.py` wants it."""

    def executor(self, block_size: int) -> Any:
        """The drafter as the drafting side wants it."""


def remembered(logits_of: LogitsOf) -> LogitsOf:
    """The same, computed once for the same tokens: many sessions decode the same prompts."""
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(tokens: list[int]) -> torch.Tensor:
        key = tuple(tokens)
        if key not in known:
            known[key] = logits_of(tokens)
        return known[key]

    return logits


@dataclass(frozen=True)
class Pair:
    """Weights that serve as target and as drafter."""

    model: LlamaForCausalLM
    drafter: DrafterModel
    _logits: dict[int, LogitsOf] = field(default_factory=dict)  # by block size

    @cached_property
    def target(self) -> LogitsOf:
        return remembered(target_logits(self.model))

    def logits(self, block_size: int) -> LogitsOf:
        plain = block_logits(self.model, block_size=block_size, mask_token_id=MASK_TOKEN_ID)
        return self._logits.setdefault(block_size, remembered(plain))

    def executor(self, block_size: int, *, num_pages: int = NUM_PAGES) -> DrafterExecutor:
        shape = CacheShape(
            num_layers=2,
            num_rows=NUM_ROWS,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_length=400,
            num_kv_heads=2,
            head_dim=8,
            dtype=torch.float64,
        )
        return DrafterExecutor(
            self.drafter,
            PagedCache(shape, CPU),
            block_size=block_size,
            mask_token_id=MASK_TOKEN_ID,
            support=SUPPORT,
        )


@lru_cache
def pair(seed: int) -> Pair:
    model = tiny_llama(seed, vocab_size=VOCAB_SIZE, weight_std=0.12, tied=True).double()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        drafter = DrafterModel(
            Path(folder), mask_token_id=MASK_TOKEN_ID, vocab_size=VOCAB_SIZE, device=CPU, dtype=torch.float64
        )
    return Pair(model, drafter)


def prompt(length: int, *, seed: int) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(MASK_TOKEN_ID), k=length)


class DraftingSession:
    """Decoding rows; `tokens` are a row's prompt and output, the last of them its anchor."""

    def __init__(
        self,
        source: Source,
        *,
        mode: Literal["sync", "async"] = "async",
        block_size: int = 4,
        coverage: int = 3,
        fanout: int = 2,
        sibling: bool = False,
        max_positions: int = 1000,
        executor: Any = None,
    ) -> None:
        self.block_size = block_size
        self.method = Method(
            target=source.target,
            drafter=source.logits(block_size),
            mode=mode,
            coverage=coverage,
            fanout=fanout,
        )
        executor = executor or source.executor(block_size)
        num_pages = executor.cache.shape.num_pages
        pool = PagePool(num_pages=num_pages, page_size=PAGE_SIZE, num_rows=NUM_ROWS)
        planner = BranchPlanner(block_size=block_size, coverage=coverage, fanout=fanout)
        self.store = ProposalStore(
            num_rows=NUM_ROWS, block_size=block_size, support=executor.support, device=CPU
        )
        self.rows = DrafterRows(executor, pool, max_positions=max_positions, packed=mode == "async")
        self.drafting = Drafting(
            self.rows, self.store, device=CPU, planner=planner if mode == "async" else None, sibling=sibling
        )
        self.prompts: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.rounds: dict[int, list[Round]] = {}
        self._generation = 0

    def start(self, row: int, prompt: Sequence[int]) -> str | None:
        """A request takes over a row; says why it gets no drafts, if so."""
        self._generation += 1
        self.prompts[row] = list(prompt)
        self.rounds[row] = []
        refusal = self.drafting.extend(row, prompt, prefix_len=0, generation=self._generation)
        self.tokens[row] = [*prompt, self._next(prompt)]
        return refusal

    def round(self, *rows: int) -> None:
        """One round of a batch of `rows`, with everything it did written down."""
        for row in rows:
            tokens = self.tokens[row]
            self.drafting.keep(row, host_len=len(tokens), token_ids=lambda tokens=tokens: tokens)
        batch = self._batch(rows)
        origins = self.store.origins(rows)
        proposal = self.drafting.propose(batch, rows)
        block = torch.cat([batch.anchor[:, None], proposal.tokens], dim=1)
        ahead = self.drafting.draft_ahead(batch, block, proposal)
        chosen = [
            self.method.target([*self.tokens[row], *candidates])[-self.block_size :].argmax(dim=-1)
            for row, candidates in zip(rows, proposal.tokens.tolist(), strict=True)
        ]
        verify = accept_block(proposal.tokens, proposal.prop_len, torch.stack(chosen))
        self.drafting.resolve(batch, block, ahead, verify)
        for i, row in enumerate(rows):
            draft = proposal.tokens[i, : proposal.prop_len[i]].tolist()
            accept_len, bonus = int(verify.accept_len[i]), int(verify.bonus[i])
            origin = origins[i].name.lower()
            self.rounds[row].append(Round(self.tokens[row][-1], draft, accept_len, bonus, origin))  # type: ignore[arg-type]
            self.tokens[row] += [*draft[:accept_len], bonus]

    def output(self, row: int) -> list[int]:
        return self.tokens[row][len(self.prompts[row]) :]

    def assert_reference(self, row: int) -> None:
        """The rounds of a row are those of `reference.py` on its prompt alone."""
        num_tokens = len(self.output(row))
        generation = self.method.generate(self.prompts[row], num_tokens, eos_ids=frozenset())
        assert generation.rounds == self.rounds[row]
        assert generation.output_ids == self.output(row)

    def assert_plain(self, row: int) -> None:
        """The output of a row is what the target alone would have said."""
        logits = self.method.target(self.tokens[row])[len(self.prompts[row]) - 1 : -1]
        assert logits.argmax(dim=-1).tolist() == self.output(row)

    def _next(self, tokens: Sequence[int]) -> int:
        return int(self.method.target(list(tokens))[-1].argmax())

    def _batch(self, rows: Sequence[int]) -> RowBatch:
        committed = torch.tensor([len(self.tokens[row]) - 1 for row in rows])
        return RowBatch(
            rows=torch.tensor(rows),
            anchor=torch.tensor([self.tokens[row][-1] for row in rows]),
            committed_len=committed,
            bound=int(committed.max()) + self.block_size,
            sampling=None,
        )
