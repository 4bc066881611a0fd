"""The worker, round by round: against `reference.py` and against plain decoding, with a scripted drafter.

The target and the drafter are functions of the whole token history (see scripted_pair.py), so equality is exact
and a row that reads one wrong token differs from there on. Outputs reach the requests a round late, as under
SGLang's overlap scheduler.

Legend: N rows, B block size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.scripted_pair import (
    VOCAB_SIZE,
    ScriptedExecutor,
    SlotTarget,
    all_logits,
    next_logits,
    plain_decode,
    scripted_logits,
)

from bench.worker_rig import D3DDraftInput, GenerationBatchResult, RigSizes, WorkerRig
from d3d_sglang.reference import Method, Round

PROMPTS = ([3, 1, 4, 1, 5], [9], list(range(20, 43)), [2, 7, 1, 8, 2, 8, 1, 8, 2, 8])
NO_EOS: frozenset[int] = frozenset()


class Session:
    """Requests that decode together; keeps what every round did with every request."""

    def __init__(self, *, block_size: int = 4, max_positions: int = 1000, num_requests: int = 4) -> None:
        sizes = RigSizes(
            block_size=block_size,
            vocab_size=VOCAB_SIZE,
            num_requests=num_requests,
            max_len=600,
            max_positions=max_positions,
        )
        self.block_size = block_size
        self.rig = WorkerRig(
            sizes,
            make_target=SlotTarget,
            make_executor=lambda n: ScriptedExecutor(num_rows=n, capacity=620, block_size=block_size),
        )
        self.worker = self.rig.worker
        self.reqs: list[Any] = []
        self.rounds: dict[str, list[Round]] = {}
        self.first_token: dict[str, int] = {}
        self.draft_input: D3DDraftInput | None = None
        self._late: list[tuple[Any, list[int]]] = []

    def request(self, prompt: Sequence[int], **sampling: Any) -> Any:
        return self.rig.request(prompt, **sampling)

    def admit(self, *reqs: Any, prefix_lens: Sequence[int] | None = None) -> GenerationBatchResult:
        """Prefill whole requests and let them join the decoding ones."""
        ends = [len(req.origin_input_ids) + len(req.output_ids) for req in reqs]
        batch = self.rig.extend_batch(reqs, ends=ends, prefix_lens=prefix_lens or [0] * len(reqs))
        result = self.rig.run(batch)
        self._deliver([(req, [token]) for req, token in zip(reqs, result.next_token_ids.tolist(), strict=True)])
        for req, token in zip(reqs, result.next_token_ids.tolist(), strict=True):
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

    def _record(self, seq_lens: torch.Tensor, result: GenerationBatchResult) -> None:
        size, late = self.block_size, []
        block = self.rig.target.calls[-1].block.tolist()
        out_tokens = result.next_token_ids.view(-1, size).tolist()
        for i, req in enumerate(self.reqs):
            num_new = int(result.accept_lens[i])
            new = out_tokens[i][:num_new]
            assert new[:-1] == block[i][1:num_new], "accepted tokens are not the candidates"
            assert int(result.new_seq_lens[i]) == int(seq_lens[i]) + num_new
            self.rounds.setdefault(req.rid, []).append(
                Round(block[i][0], block[i][1:], num_new - 1, new[-1], "redraft")
            )
            late.append((req, new))
        self._deliver(late)

    def _deliver(self, tokens: list[tuple[Any, list[int]]]) -> None:
        for req, new in self._late:
            req.output_ids.extend(new)
        self._late = tokens


def reference_rounds(prompt: Sequence[int], num_tokens: int, *, block_size: int) -> list[Round]:
    method = Method(
        target=all_logits, drafter=partial(scripted_logits, block_size=block_size), mode="sync"
    )
    return method.generate(list(prompt), num_tokens, eos_ids=NO_EOS).rounds


def assert_plain(session: Session, req: Any, prompt: Sequence[int]) -> None:
    output = session.output(req)
    assert output == plain_decode(prompt, len(output))


@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_rounds_agree_with_the_reference(block_size: int) -> None:
    session = Session(block_size=block_size)
    reqs = [session.request(prompt) for prompt in PROMPTS]
    session.admit(*reqs)
    num_rounds = 6 + 3 * block_size
    for _ in range(num_rounds):
        session.round()
    accept_lens = set()
    for prompt, req in zip(PROMPTS, reqs, strict=True):
        rounds = session.rounds[req.rid]
        num_tokens = 1 + sum(r.accept_len + 1 for r in rounds)
        assert rounds == reference_rounds(prompt, num_tokens, block_size=block_size)
        assert_plain(session, req, prompt)
        accept_lens |= {r.accept_len for r in rounds}
    assert accept_lens == set(range(block_size)), "the script does not reach every accept length"


def test_rows_that_come_and_go_agree_with_the_reference() -> None:
    session = Session(num_requests=3)
    first, second, third = (session.request(prompt) for prompt in PROMPTS[:3])
    session.admit(first)
    for _ in range(3):
        session.round()
    session.admit(second, third)
    for _ in range(4):
        session.round()
    session.leave(first)
    session.round()
    reused = session.request(PROMPTS[3])
    session.admit(reused)  # gets the row of the first
    for _ in range(5):
        session.round()
    for prompt, req in zip(PROMPTS, (first, second, third, reused), strict=True):
        rounds = session.rounds[req.rid]
        num_tokens = 1 + sum(r.accept_len + 1 for r in rounds)
        assert rounds == reference_rounds(prompt, num_tokens, block_size=4)


def test_a_retracted_request_is_read_again_and_drafts_on() -> None:
    session = Session()
    req = session.request(PROMPTS[0])
    session.admit(req)
    for _ in range(4):
        session.round()
    before = session.output(req)
    session.leave(req)
    session.admit(req, prefix_lens=[2])  # the target still had two tokens cached
    # The target's next token is the output's, so the request goes on where it was.
    assert session.draft_input is not None
    anchor = session.draft_input.bonus_tokens
    prompt = [*PROMPTS[0], *before]
    assert anchor is not None and anchor.tolist() == plain_decode(prompt, 1)
    session.rounds[req.rid] = []
    for _ in range(6):
        session.round()
    num_tokens = 1 + sum(r.accept_len + 1 for r in session.rounds[req.rid])
    assert session.rounds[req.rid] == reference_rounds(prompt, num_tokens, block_size=4)


def test_a_batch_drafts_what_its_rows_draft_alone() -> None:
    together = Session()
    reqs = [together.request(prompt) for prompt in PROMPTS]
    together.admit(*reqs)
    for _ in range(5):
        together.round()
    for prompt, req in zip(PROMPTS, reqs, strict=True):
        alone = Session()
        single = alone.request(prompt)
        alone.admit(single)
        for _ in range(5):
            alone.round()
        assert alone.rounds[single.rid] == together.rounds[req.rid]


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_chunked_prefill_drafts_as_one_prefill(chunk: int) -> None:
    prompt = PROMPTS[2]
    session = Session()
    req = session.request(prompt)
    for start in range(0, len(prompt) - chunk, chunk):
        batch = session.rig.extend_batch([req], ends=[start + chunk], prefix_lens=[start])
        session.rig.run(batch)
    done = start + chunk
    session.admit(req, prefix_lens=[done])
    executor = session.worker.drafting.executor
    assert executor.prefills[1][1:] == (chunk, min(chunk, len(prompt) - chunk)), "a chunk is read once"
    for _ in range(6):
        session.round()
    rounds = session.rounds[req.rid]
    num_tokens = 1 + sum(r.accept_len + 1 for r in rounds)
    assert rounds == reference_rounds(prompt, num_tokens, block_size=4)


def test_a_prefix_hit_is_read_whole_by_the_drafter() -> None:
    session = Session()
    first = session.request(PROMPTS[2])
    session.admit(first)
    again = session.request(PROMPTS[2])
    slots = session.rig.pool.req_to_token
    free_row = session.rig.pool.free_slots[-1]
    slots[free_row, :20] = slots[first.kv.req_pool_idx, :20]  # what a radix hit of 20 tokens does
    session.admit(again, prefix_lens=[20])
    for _ in range(5):
        session.round()
    assert session.rounds[again.rid] == session.rounds[first.rid]


def test_rows_without_drafts_decode_one_token_a_round() -> None:
    session = Session()
    lost, kept = session.request(PROMPTS[0]), session.request(PROMPTS[1])
    session.admit(lost, kept)
    session.round()
    session.worker.drafting.skip(lost.kv.req_pool_idx)
    for _ in range(6):
        session.round()
    assert [r.accept_len for r in session.rounds[lost.rid][1:]] == [0] * 6
    assert max(r.accept_len for r in session.rounds[kept.rid]) > 0
    assert_plain(session, lost, PROMPTS[0])
    rounds = session.rounds[kept.rid]
    num_tokens = 1 + sum(r.accept_len + 1 for r in rounds)
    assert rounds == reference_rounds(PROMPTS[1], num_tokens, block_size=4)


def test_after_a_flush_running_rows_go_on_without_drafts_and_new_ones_draft() -> None:
    session = Session()
    old = session.request(PROMPTS[0])
    session.admit(old)
    session.round()
    session.worker.clear_cache_pool()
    new = session.request(PROMPTS[1])
    session.admit(new)
    for _ in range(6):
        session.round()
    assert [r.accept_len for r in session.rounds[old.rid][1:]] == [0] * 6
    assert_plain(session, old, PROMPTS[0])
    num_tokens = 1 + sum(r.accept_len + 1 for r in session.rounds[new.rid])
    assert session.rounds[new.rid] == reference_rounds(PROMPTS[1], num_tokens, block_size=4)


def test_drafts_stop_where_the_drafter_ends() -> None:
    # Positions are 0 to 29: a block of 4 may start at 26 and not at 27.
    session = Session(max_positions=30)
    req = session.request(PROMPTS[3])
    session.admit(req)
    committed = len(PROMPTS[3])
    for _ in range(30):
        session.round()
        accept_len = session.rounds[req.rid][-1].accept_len
        assert accept_len == 0 or committed + 4 <= 30
        committed += accept_len + 1
    assert committed > 40, "the edge was not crossed"
    assert_plain(session, req, PROMPTS[3])
    inside = [r for r in session.rounds[req.rid] if r.accept_len > 0]
    assert inside, "no drafts before the edge"


@pytest.mark.parametrize(("prompt_len", "fits"), [(26, True), (27, False)])
def test_a_prompt_too_long_for_the_drafter_is_counted_and_decodes(prompt_len: int, fits: bool) -> None:
    session = Session(max_positions=30)
    prompt = [i % VOCAB_SIZE for i in range(prompt_len)]
    req = session.request(prompt)
    session.admit(req)
    for _ in range(5):
        session.round()
    assert_plain(session, req, prompt)
    assert session.worker.state()["fallbacks"] == ({} if fits else {"too_long": 1})
    assert bool(session.worker.drafting.executor.prefills) == fits
    if not fits:
        assert [r.accept_len for r in session.rounds[req.rid]] == [0] * 5


def test_a_prompt_of_embeddings_is_counted_and_decodes() -> None:
    session = Session()
    req = session.request(PROMPTS[0])
    req.input_embeds = [[0.0]]
    session.admit(req)
    for _ in range(4):
        session.round()
    assert [r.accept_len for r in session.rounds[req.rid]] == [0] * 4
    assert session.worker.state()["fallbacks"] == {"input_embeds": 1}


def test_a_round_returns_what_the_scheduler_reads() -> None:
    session = Session()
    reqs = [session.request(prompt) for prompt in PROMPTS]
    extended = session.admit(*reqs)
    seq_lens = torch.tensor([len(prompt) for prompt in PROMPTS])
    assert torch.equal(extended.new_seq_lens, seq_lens)
    assert extended.accept_lens is None
    result = session.round()
    size, num_rows = 4, len(PROMPTS)
    assert result.next_token_ids.shape == (num_rows * size,) and result.next_token_ids.dtype == torch.int64
    assert result.accept_lens.dtype == torch.int32  # SGLang adds them to int32 counters
    assert result.speculative_num_draft_tokens == size
    assert torch.equal(result.new_seq_lens, seq_lens + result.accept_lens)
    assert result.logits_output.hidden_states is None
    draft_input = result.next_draft_input
    last = result.accept_lens.long()[:, None] - 1
    bonus = result.next_token_ids.view(num_rows, size).gather(1, last).squeeze(1)
    assert torch.equal(draft_input.bonus_tokens, bonus)
    assert torch.equal(draft_input.new_seq_lens, result.new_seq_lens)
    call = session.rig.target.calls[0]
    assert torch.equal(call.seq_lens_cpu, seq_lens + size), "host plans expect lengths with the block"
    assert call.seq_lens_sum == int((seq_lens + size).sum())


def test_a_backend_without_host_lengths_gets_none() -> None:
    session = Session()
    session.admit(session.request(PROMPTS[0]))

    def without_host_lengths(batch: Any) -> None:
        batch.seq_lens_cpu = None
        batch.seq_lens_sum = None

    session.round(without_host_lengths)
    call = session.rig.target.calls[-1]
    assert call.seq_lens_cpu is None and call.seq_lens_sum is None
