"""The worker, round by round: against `reference.py` and against plain decoding, with a scripted drafter.

The target and the drafter are functions of the whole token history (see scripted_pair.py), so equality is
exact and a row that reads one wrong token differs from there on.

Legend: N rows, B block size.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch

from bench.worker_rig import D3DDraftInput
from d3d_sglang.integration.drafter_setup import PAGE_SIZE
from tests.unit.scripted_pair import VOCAB_SIZE, plain_decode
from tests.unit.worker_session import Session

PROMPTS = ([3, 1, 4, 1, 5], [9], list(range(20, 43)), [2, 7, 1, 8, 2, 8, 1, 8, 2, 8])
BOTH_MODES = pytest.mark.parametrize("mode", ["sync", "async"])
Mode = Literal["sync", "async"]


def decoded(session: Session, *prompts: Sequence[int], num_rounds: int) -> list[Any]:
    """Requests that were read together and decoded for some rounds."""
    reqs = [session.request(prompt) for prompt in prompts]
    session.admit(*reqs)
    for _ in range(num_rounds):
        session.round()
    return reqs


@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_synchronous_rounds_agree_with_the_reference(block_size: int) -> None:
    session = Session(block_size=block_size, coverage=1)
    accept_lens = set()
    for req in decoded(session, *PROMPTS, num_rounds=6 + 3 * block_size):
        session.assert_reference(req)
        session.assert_plain(req)
        accept_lens |= {done.accept_len for done in session.rounds[req.rid]}
    assert accept_lens == set(range(block_size)), "the script does not reach every accept length"


@pytest.mark.parametrize(
    ("block_size", "coverage", "fanout", "num_rounds"),
    [(2, 1, 1, 12), (2, 2, 2, 12), (4, 3, 1, 40), (4, 4, 2, 40), (6, 4, 2, 40), (16, 12, 2, 40)],
)
def test_asynchronous_rounds_agree_with_the_reference(
    block_size: int, coverage: int, fanout: int, num_rounds: int
) -> None:
    session = Session(mode="async", block_size=block_size, coverage=coverage, fanout=fanout)
    seen = set()
    for req in decoded(session, *PROMPTS, num_rounds=num_rounds):
        session.assert_reference(req)
        session.assert_plain(req)
        seen |= {(done.origin, done.prop_len) for done in session.rounds[req.rid]}
    wanted = {("redraft", block_size - 1), ("full", block_size - 2)}
    assert seen == wanted | ({("hit", block_size - 1)} if coverage > 1 else set())


def test_hits_and_misses_occur_at_every_position() -> None:
    """The script reaches what it should: otherwise the agreement above would say little."""
    session = Session(mode="async", block_size=4, coverage=3, fanout=2)
    followed = set()
    for req in decoded(session, *PROMPTS, num_rounds=60):
        rounds = session.rounds[req.rid]
        followed |= {(done.prop_len, done.accept_len, after.origin) for done, after in pairwise(rounds)}
    rejected = {(accept_len, origin) for prop_len, accept_len, origin in followed if accept_len < prop_len}
    assert rejected == {(0, "hit"), (1, "hit"), (0, "redraft"), (1, "redraft"), (2, "redraft")}
    accepted = {(prop_len, origin) for prop_len, accept_len, origin in followed if accept_len == prop_len}
    assert accepted == {(3, "full"), (2, "full"), (3, "redraft"), (2, "redraft")}


def test_after_a_miss_siblings_are_verified_and_the_text_stays() -> None:
    session = Session(mode="async", coverage=3, miss="sibling")
    reqs = decoded(session, *PROMPTS, num_rounds=40)
    for req in reqs:
        session.assert_plain(req)
        rounds = session.rounds[req.rid]
        assert [done.origin for done in rounds].count("redraft") == 1, "a row waited after its first round"
    rounds = [done for req in reqs for done in session.rounds[req.rid]]
    counts = Counter(done.origin for done in rounds)
    assert set(counts) == {"redraft", "hit", "full", "sibling"}
    assert any(done.accept_len for done in rounds if done.origin == "sibling"), "no sibling was of use"
    assert session.worker.state()["row_rounds_by_origin"] == {"none": 0, **counts}


@BOTH_MODES
def test_rows_that_come_and_go_agree_with_the_reference(mode: Mode) -> None:
    session = Session(mode=mode, num_requests=3)
    (first,) = decoded(session, PROMPTS[0], num_rounds=3)
    second, third = decoded(session, *PROMPTS[1:3], num_rounds=4)
    session.leave(first)
    session.round()
    (reused,) = decoded(session, PROMPTS[3], num_rounds=5)  # gets the row of the first
    for req in (first, second, third, reused):
        session.assert_reference(req)


@BOTH_MODES
def test_a_retracted_request_is_read_again_and_drafts_on(mode: Mode) -> None:
    session = Session(mode=mode)
    (req,) = decoded(session, PROMPTS[0], num_rounds=4)
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
    session.assert_reference(req, prompt=prompt)


@BOTH_MODES
def test_a_batch_drafts_what_its_rows_draft_alone(mode: Mode) -> None:
    together = Session(mode=mode)
    reqs = decoded(together, *PROMPTS, num_rounds=8)
    for prompt, req in zip(PROMPTS, reqs, strict=True):
        alone = Session(mode=mode)
        (single,) = decoded(alone, prompt, num_rounds=8)
        assert alone.rounds[single.rid] == together.rounds[req.rid]


@BOTH_MODES
@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_chunked_prefill_drafts_as_one_prefill(mode: Mode, chunk: int) -> None:
    prompt = PROMPTS[2]
    session = Session(mode=mode)
    req = session.request(prompt)
    for start in range(0, len(prompt) - chunk, chunk):
        batch = session.rig.extend_batch([req], ends=[start + chunk], prefix_lens=[start])
        session.rig.run(batch)
    session.admit(req, prefix_lens=[start + chunk])
    assert session.executor.prefills[1][1:] == (chunk, min(chunk, len(prompt) - chunk)), (
        "a chunk is read once"
    )
    for _ in range(6):
        session.round()
    session.assert_reference(req)


@BOTH_MODES
def test_a_prefix_hit_of_the_target_is_no_prefix_of_the_drafter(mode: Mode) -> None:
    session = Session(mode=mode)
    (first,) = decoded(session, PROMPTS[2], num_rounds=0)
    session.rows.pool.clear()  # the drafter has lost what the target still has
    again = session.request(PROMPTS[2])
    slots = session.rig.pool.req_to_token
    free_row = session.rig.pool.free_slots[-1]
    slots[free_row, :20] = slots[first.kv.req_pool_idx, :20]  # what a radix hit of 20 tokens does
    session.admit(again, prefix_lens=[20])
    assert session.executor.prefills[-1] == (free_row, 0, len(PROMPTS[2]))
    for _ in range(5):
        session.round()
    session.assert_reference(again)


@BOTH_MODES
def test_a_prompt_seen_before_is_read_from_its_pages(mode: Mode) -> None:
    """Pages of decoded tokens too: the second prompt is the first one with its answer."""
    session = Session(mode=mode)
    (first,) = decoded(session, PROMPTS[2], num_rounds=30)
    prompt = [*PROMPTS[2], *session.output(first)]
    assert len(first.output_ids) > 3 * PAGE_SIZE
    (again,) = decoded(session, prompt, num_rounds=0)
    (_, start, num_read) = session.executor.prefills[-1]
    # Some of what was decoded last has not reached the host or not been read: see `Drafting.keep`.
    host_len = len(PROMPTS[2]) + len(first.output_ids)
    assert start % PAGE_SIZE == 0 and host_len - PAGE_SIZE - 3 * session.block_size <= start <= host_len
    assert start + num_read == len(prompt)
    stats = session.worker.state()["pages"]
    assert stats["shared_tokens"] == start
    assert stats["recomputed_tokens"] == len(PROMPTS[2]) + num_read
    for _ in range(12):
        session.round()
    session.assert_reference(first)
    session.assert_reference(again)


def test_rows_without_drafts_decode_one_token_a_round() -> None:
    session = Session()
    lost, kept = decoded(session, PROMPTS[0], PROMPTS[1], num_rounds=1)
    session.rows.skip(lost.kv.req_pool_idx)
    for _ in range(6):
        session.round()
    assert session.prop_lens == [[3, 3], *[[0, 3]] * 6]
    assert [done.accept_len for done in session.rounds[lost.rid][1:]] == [0] * 6
    session.assert_plain(lost)
    session.assert_reference(kept)
    assert session.worker.state()["fallbacks"] == {}, "whoever skips a row says why"


def test_a_row_without_drafts_asks_for_none_when_others_are_drafted_ahead() -> None:
    session = Session(mode="async")
    lost, kept = decoded(session, PROMPTS[0], PROMPTS[1], num_rounds=1)
    session.rows.skip(lost.kv.req_pool_idx)
    for _ in range(8):
        session.round()
    # What was waiting when the row lost its pages is still verified.
    assert [lens[0] for lens in session.prop_lens[2:]] == [0] * 7
    assert [origins[0] for origins in session.origins[2:]] == ["none"] * 7
    session.assert_plain(lost)
    session.assert_reference(kept)


@BOTH_MODES
def test_after_a_flush_running_rows_go_on_without_drafts_and_new_ones_draft(mode: Mode) -> None:
    session = Session(mode=mode)
    (old,) = decoded(session, PROMPTS[0], num_rounds=1)
    session.worker.clear_cache_pool()
    (new,) = decoded(session, PROMPTS[1], num_rounds=6)
    assert [lens[0] for lens in session.prop_lens[2:]] == [0] * 5
    session.assert_plain(old)
    session.assert_reference(new)
    assert session.worker.state()["fallbacks"] == {}


@BOTH_MODES
def test_out_of_pages_a_row_decodes_plainly_is_counted_and_harms_nobody(mode: Mode) -> None:
    # 8 pages of 16 tokens: enough for the prompts, not for two answers.
    session = Session(mode=mode, num_requests=2, max_total_tokens=32)
    assert session.rows.pool.num_pages == 8
    reqs = decoded(session, PROMPTS[2], PROMPTS[3], num_rounds=0)
    for _ in range(60):
        session.round()
        session.rows.pool.check()
    for req in reqs:
        session.assert_plain(req)
    assert session.worker.state()["fallbacks"] == {"out_of_pages": 2}
    assert [0, 0] not in session.prop_lens[:4] and session.prop_lens[-1] == [0, 0]
    for req in reqs:
        session.leave(req)
    (after,) = decoded(session, PROMPTS[0], num_rounds=6)
    session.assert_reference(after)


@BOTH_MODES
def test_drafts_stop_where_the_drafter_ends(mode: Mode) -> None:
    # Positions are 0 to 29: a block of 4 may start at 26 and not at 27.
    session = Session(mode=mode, max_positions=30)
    (req,) = decoded(session, PROMPTS[3], num_rounds=0)
    committed = len(PROMPTS[3])
    for _ in range(30):
        session.round()
        full = session.origins[-1][0] == "full"
        assert session.prop_lens[-1] == [3 - full if committed + 4 <= 30 else 0]
        committed += session.rounds[req.rid][-1].accept_len + 1
    assert committed > 40, "the edge was not crossed"
    session.assert_plain(req)
    assert session.worker.state()["fallbacks"] == {}


@BOTH_MODES
@pytest.mark.parametrize(("prompt_len", "fits"), [(26, True), (27, False)])
def test_a_prompt_too_long_for_the_drafter_is_counted_and_decodes(
    mode: Mode, prompt_len: int, fits: bool
) -> None:
    session = Session(mode=mode, max_positions=30)
    (req,) = decoded(session, [i % VOCAB_SIZE for i in range(prompt_len)], num_rounds=5)
    session.assert_plain(req)
    assert session.worker.state()["fallbacks"] == ({} if fits else {"too_long": 1})
    assert bool(session.executor.prefills) == fits
    assert session.prop_lens[0] == [3 if fits else 0]


@BOTH_MODES
def test_a_prompt_of_embeddings_is_counted_and_decodes(mode: Mode) -> None:
    session = Session(mode=mode, num_requests=1)
    (before,) = decoded(session, PROMPTS[0], num_rounds=2)
    session.leave(before)
    num_rounds = len(session.prop_lens)
    req = session.request(PROMPTS[0])  # as long as what the drafter read into its row before
    req.input_embeds = [[0.0]]
    session.admit(req)
    for _ in range(4):
        session.round()
    assert session.prop_lens[num_rounds:] == [[0]] * 4
    assert session.worker.state()["fallbacks"] == {"input_embeds": 1}


@BOTH_MODES
def test_a_round_returns_what_the_scheduler_reads(mode: Mode) -> None:
    session = Session(mode=mode)
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
    session = Session(block_size=4)
    session.worker.on_verify_complete_cpu([3, 0])
    session.worker.on_verify_complete_cpu([1])
    decoded(session, PROMPTS[2], num_rounds=2)
    state = session.worker.state()
    assert state["accept_length_histogram"] == [1, 1, 0, 1]
    assert (state["rounds"], state["row_rounds"], state["block_size"]) == (2, 3, 4)
    assert state["options"] == {
        "mode": "sync",
        "coverage": 4,
        "fanout": 2,
        "miss": "redraft",
        "draft_sampling": "match",
        "drafter_device": "target",
    }
    assert state["option_sources"]["mode"] == "SGLANG_D3D_MODE"
    assert state["option_sources"]["miss"] == "default"
    assert state["row_rounds_by_origin"] == {"redraft": 2, "hit": 0, "full": 0, "sibling": 0, "none": 0}
    assert state["pages"]["recomputed_tokens"] == len(PROMPTS[2])
    json.dumps(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"fanout": 20}, "fanout is 20, allowed are 1 to 19"), ({"coverage": 5}, "coverage is 5")],
)
def test_a_grid_that_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Session(mode="async", block_size=4, **options)
