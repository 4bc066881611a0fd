"""The worker, round by round: against `reference.py` and against plain decoding, with a scripted drafter.

The target and the drafter are functions of the whole token history (see scripted_pair.py), so equality is
exact and a row that reads one wrong token differs from there on.

Legend: N rows, B block size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from bench.worker_rig import D3DDraftInput
from d3d_sglang.reference import Method, Round
from tests.unit.scripted_pair import VOCAB_SIZE, all_logits, plain_decode, scripted_logits
from tests.unit.worker_session import Session

PROMPTS = ([3, 1, 4, 1, 5], [9], list(range(20, 43)), [2, 7, 1, 8, 2, 8, 1, 8, 2, 8])
NO_EOS: frozenset[int] = frozenset()


def reference_rounds(prompt: Sequence[int], num_tokens: int, *, block_size: int) -> list[Round]:
    method = Method(target=all_logits, drafter=partial(scripted_logits, block_size=block_size), mode="sync")
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
    assert session.prop_lens == [[3, 3], *[[0, 3]] * 6]
    assert [r.accept_len for r in session.rounds[lost.rid][1:]] == [0] * 6
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
    assert session.prop_lens == [[3], *[[0, 3]] * 6]
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
        assert session.prop_lens[-1] == [3 if committed + 4 <= 30 else 0]
        committed += session.rounds[req.rid][-1].accept_len + 1
    assert committed > 40, "the edge was not crossed"
    assert_plain(session, req, PROMPTS[3])


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
    assert session.prop_lens[0] == [3 if fits else 0]


def test_a_prompt_of_embeddings_is_counted_and_decodes() -> None:
    session = Session(num_requests=1)
    before = session.request(PROMPTS[0])
    session.admit(before)
    session.leave(before)
    req = session.request(PROMPTS[0])  # as long as what the drafter read into its row before
    req.input_embeds = [[0.0]]
    session.admit(req)
    for _ in range(4):
        session.round()
    assert session.prop_lens == [[0]] * 4
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


def draft_input(*tokens: int, overlap: bool) -> D3DDraftInput:
    """Anchors `tokens` of rows of 10 times as many tokens; under overlap only row indices are relayed."""
    anchors = torch.tensor(tokens)
    if overlap:
        return D3DDraftInput(bonus_tokens=None, new_seq_lens=anchors * 10, future_indices=anchors)
    return D3DDraftInput(bonus_tokens=anchors, new_seq_lens=anchors * 10)


def test_draft_input_filter_and_merge_without_overlap() -> None:
    rows = draft_input(1, 2, 3, overlap=False)
    rows.filter_batch(torch.tensor([2, 0]))
    rows.merge_batch(draft_input(4, overlap=False))
    assert rows.bonus_tokens is not None and rows.bonus_tokens.tolist() == [3, 1, 4]
    assert rows.new_seq_lens.tolist() == [30, 10, 40]
    assert rows.future_indices is None


def test_draft_input_filter_and_merge_with_overlap() -> None:
    rows = draft_input(1, 2, 3, overlap=True)
    rows.filter_batch(torch.tensor([1, 2]), torch.tensor([1, 2]))
    rows.merge_batch(draft_input(5, 4, overlap=True))
    assert rows.future_indices is not None and rows.future_indices.tolist() == [2, 3, 5, 4]


@pytest.mark.parametrize("overlap", [False, True])
def test_draft_input_of_no_rows(overlap: bool) -> None:
    rows = draft_input(1, 2, overlap=overlap)
    rows.filter_batch(torch.tensor([], dtype=torch.int64))
    rows.merge_batch(draft_input(3, overlap=overlap))
    kept = rows.future_indices if overlap else rows.bonus_tokens
    assert kept is not None and kept.tolist() == [3]


def test_state_shows_rounds_and_options() -> None:
    worker = Session(block_size=4).worker
    worker.on_verify_complete_cpu([3, 0])
    worker.on_verify_complete_cpu([1])
    state = worker.state()
    assert state["accept_length_histogram"] == [1, 1, 0, 1]
    assert (state["rounds"], state["row_rounds"], state["block_size"]) == (2, 3, 4)
    assert state["options"] == {"mode": "sync", "drafter_device": "target"}
    assert state["option_sources"] == {"mode": "default", "drafter_device": "default"}
    json.dumps(state)
