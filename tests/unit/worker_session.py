"""A session of requests on a worker rig, with the scripted target and drafter.

Outputs reach the requests a round late, as under SGLang's overlap scheduler.

Legend: N rows, B block size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch

from bench.worker_rig import D3DDraftInput, GenerationBatchResult, RigSizes, WorkerRig
from d3d_sglang.drafter.rows import RowBatch
from d3d_sglang.reference import Method, Round
from d3d_sglang.spec_types import DraftProposal
from tests.unit.scripted_pair import (
    VOCAB_SIZE,
    ScriptedExecutor,
    SlotTarget,
    all_logits,
    plain_decode,
    scripted_logits,
)


class Session:
    """Requests that decode together; keeps what every round did with every request."""

    def __init__(
        self,
        *,
        mode: Literal["sync", "async"] = "sync",
        block_size: int = 4,
        coverage: int = 4,
        fanout: int = 2,
        max_positions: int = 1000,
        num_requests: int = 4,
        max_total_tokens: int | None = None,
        **options: str,
    ) -> None:
        sizes = RigSizes(
            block_size=block_size,
            vocab_size=VOCAB_SIZE,
            num_requests=num_requests,
            max_len=600,
            max_positions=max_positions,
            max_total_tokens=max_total_tokens,
        )
        self.block_size = block_size
        self.method = Method(
            target=all_logits,
            drafter=partial(scripted_logits, block_size=block_size),
            mode=mode,
            coverage=coverage,
            fanout=fanout,
        )
        self.rig = WorkerRig(
            sizes,
            make_target=SlotTarget,
            make_executor=ScriptedExecutor,
            options={"mode": mode, "coverage": str(coverage), "fanout": str(fanout), **options},
        )
        self.worker = self.rig.worker
        self.rows = self.worker.drafting.rows
        self.executor: ScriptedExecutor = self.rows.executor  # type: ignore[assignment]
        self.reqs: list[Any] = []
        self.rounds: dict[str, list[Round]] = {}
        self.first_token: dict[str, int] = {}
        self.draft_input: D3DDraftInput | None = None
        self.prop_lens: list[list[int]] = []  # of every round
        self.origins: list[list[Any]] = []  # of every round, in words
        self._late: list[tuple[Any, list[int]]] = []
        self._propose = self.worker.drafting.propose
        self.worker.drafting.propose = self._watched_propose  # type: ignore[method-assign]

    def request(self, prompt: Sequence[int], **settings: Any) -> Any:
        return self.rig.request(prompt, **settings)

    def admit(self, *reqs: Any, prefix_lens: Sequence[int] | None = None) -> GenerationBatchResult:
        """Prefill whole requests and let them join the decoding ones."""
        ends = [len(req.origin_input_ids) + len(req.output_ids) for req in reqs]
        batch = self.rig.extend_batch(reqs, ends=ends, prefix_lens=prefix_lens or [0] * len(reqs))
        result = self.rig.run(batch)
        first = list(zip(reqs, result.next_token_ids.tolist(), strict=True))
        self._deliver([(req, [token]) for req, token in first])
        for req, token in first:
            self.first_token.setdefault(req.rid, token)
        if self.reqs:
            assert self.draft_input is not None
            self.draft_input.merge_batch(result.next_draft_input)
        else:
            self.draft_input = result.next_draft_input
        self.reqs += reqs
        return result

    def leave(self, *reqs: Any) -> None:
        """Requests end, or are retracted: their rows are free for others."""
        self._deliver([])
        keep = [i for i, req in enumerate(self.reqs) if req not in reqs]
        assert self.draft_input is not None
        self.draft_input.filter_batch(torch.tensor(keep, dtype=torch.int64))
        self.reqs = [self.reqs[i] for i in keep]
        for req in reqs:
            self.rig.pool.free(req)

    def round(self, change: Callable[[Any], None] = lambda _batch: None) -> GenerationBatchResult:
        """One decode round; `change` may set further fields of the batch."""
        assert self.draft_input is not None
        batch = self.rig.decode_batch(self.reqs, self.draft_input)
        change(batch)
        published: list[torch.Tensor] = []
        result = self.rig.run(batch, on_publish=published.append)
        assert len(published) == 1 and torch.equal(published[0], result.new_seq_lens)
        self._record(batch.seq_lens, result)
        self.draft_input = result.next_draft_input
        return result

    def output(self, req: Any) -> list[int]:
        """All tokens of a request so far, the late ones included."""
        tokens = [self.first_token[req.rid]]
        for done in self.rounds.get(req.rid, []):
            tokens += [*done.draft[: done.accept_len], done.bonus]
        return tokens

    def assert_reference(self, req: Any, *, prompt: Sequence[int] | None = None) -> None:
        """All rounds of a request are those of `reference.py`, whose output is that of plain decoding."""
        rounds = self.rounds[req.rid]
        prompt = list(req.origin_input_ids if prompt is None else prompt)
        num_tokens = 1 + sum(done.accept_len + 1 for done in rounds)
        assert rounds == self.method.generate(prompt, num_tokens, eos_ids=frozenset()).rounds

    def assert_plain(self, req: Any) -> None:
        """The output of a request is that of plain decoding."""
        output = self.output(req)
        assert output == plain_decode(req.origin_input_ids, len(output))

    def _watched_propose(self, batch: RowBatch, indices: Sequence[int]) -> DraftProposal:
        assert batch.rows.tolist() == list(indices)
        assert batch.bound >= int(batch.committed_len.max()), "not an upper bound"
        origins = self.worker.drafting._store.origins(indices)
        proposal = self._propose(batch, indices)
        self.origins.append([origin.name.lower() for origin in origins])
        self.prop_lens.append(proposal.prop_len.tolist())
        return proposal

    def _record(self, seq_lens: torch.Tensor, result: GenerationBatchResult) -> None:
        size, late = self.block_size, []
        block = self.rig.target.calls[-1].block.tolist()
        out_tokens = result.next_token_ids.view(-1, size).tolist()
        for i, req in enumerate(self.reqs):
            num_new, prop_len = int(result.accept_lens[i]), self.prop_lens[-1][i]
            new = out_tokens[i][:num_new]
            assert new[:-1] == block[i][1:num_new], "accepted tokens are not the candidates"
            assert num_new <= prop_len + 1, "more was accepted than proposed"
            assert int(result.new_seq_lens[i]) == int(seq_lens[i]) + num_new
            self.rounds.setdefault(req.rid, []).append(
                Round(block[i][0], block[i][1 : prop_len + 1], num_new - 1, new[-1], self.origins[-1][i])
            )
            late.append((req, new))
        self._deliver(late)

    def _deliver(self, tokens: list[tuple[Any, list[int]]]) -> None:
        for req, new in self._late:
            req.output_ids.extend(new)
        self._late = tokens
