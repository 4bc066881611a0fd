"""Everything a request can ask of sampling gives the plain server's tokens."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from tests.e2e.asking import Reply, RunningServer, same_reply
from tests.e2e.cases import (
    BIASES,
    CAR_SCHEMA,
    COMMA_ID,
    END_ID,
    GRAMMARS,
    IDENTITY,
    LENGTHS,
    LOGPROBS,
    MINIMA,
    PENALTIES,
    STOPS,
    VERDICT,
    WITH_EFFECT,
    YES_ID,
    Case,
)

pytestmark = pytest.mark.parametrize("server", ["scripted", "ahead"], indirect=True)

# fp32 logits of a 16-token block and of one token, summed in another order, differ by about 1e-5.
LOGPROB_TOLERANCE = 1e-3
NUM_SAMPLED = 10  # tokens; about as many rounds, of 16 rows, which take seconds each


@pytest.mark.parametrize("case", [*STOPS, *LENGTHS, *WITH_EFFECT, *GRAMMARS], ids=str)
def test_tokens_text_and_end_are_plain(server: RunningServer, plain: dict[str, Reply], case: Case) -> None:
    same_reply(plain[case.name], server.ask_once(case).reply)


@pytest.mark.parametrize("case", WITH_EFFECT, ids=str)
def test_these_parameters_change_the_answer(
    server: RunningServer, plain: dict[str, Reply], case: Case
) -> None:
    """Else the comparison above would hold for a server that ignores them."""
    without = plain[case.without_parameters().name].output_ids
    assert server.ask_once(case).reply.output_ids[: len(without)] != without or case in MINIMA


def test_penalised_and_plain_rows_in_one_batch(server: RunningServer, plain: dict[str, Reply]) -> None:
    cases = [case for pair in zip(IDENTITY, (*PENALTIES, *MINIMA), strict=True) for case in pair]
    for reply in server.ask_together(cases, at_once=12):
        same_reply(plain[reply.case.name], reply)


def test_grammar_and_free_rows_in_one_batch(server: RunningServer, plain: dict[str, Reply]) -> None:
    cases = (*GRAMMARS, *IDENTITY[:3], *GRAMMARS, *BIASES, *GRAMMARS, *GRAMMARS, *GRAMMARS)
    assert len(cases) == 16
    for reply in server.ask_together(cases, at_once=len(cases)):
        same_reply(plain[reply.case.name], reply)


@pytest.mark.parametrize("case", [*STOPS, *LENGTHS], ids=str)
def test_an_answer_ends_inside_an_accepted_run(server: RunningServer, case: Case) -> None:
    asked = server.ask_once(case)
    reply = asked.reply
    assert len(reply.output_ids) == reply.meta["completion_tokens"] <= case.max_new_tokens
    if case.max_new_tokens == 1:
        return  # no round
    # The scripted drafter goes on to the end of the longer answer; what lies past the end is dropped.
    last = asked.rounds[-1]
    run_end = last.committed_len + 1 + last.accept_len + 1
    assert run_end >= len(case.prompt_ids) + len(reply.output_ids)


def test_some_accepted_runs_go_past_the_end(server: RunningServer) -> None:
    """The test above is about nothing if every answer ends where a run ends."""
    dropped = []
    for case in (*STOPS, *LENGTHS[:2]):
        asked = server.ask_once(case)
        run_end = asked.rounds[-1].committed_len + asked.rounds[-1].accept_len + 2
        dropped.append(run_end - len(case.prompt_ids) - len(asked.reply.output_ids))
    assert sum(count > 0 for count in dropped) >= 2, dropped


def test_stop_strings_leave_no_tail(server: RunningServer) -> None:
    for case in STOPS[:2]:
        reply = server.ask_once(case).reply
        assert reply.ended_by == "stop" and reply.meta["finish_reason"]["matched"] in case.sampling["stop"]
        assert not any(stop in reply.text for stop in case.sampling["stop"])
    before_the_stop, at_the_stop = (server.ask_once(case).reply for case in LENGTHS[:2])
    assert (before_the_stop.ended_by, at_the_stop.ended_by) == ("length", "stop")


def test_min_new_tokens_keeps_the_end_back(server: RunningServer) -> None:
    for case in MINIMA[:2]:
        reply = server.ask_once(case).reply
        minimum = case.sampling["min_new_tokens"]
        assert not {END_ID, *case.sampling.get("stop_token_ids", ())} & set(reply.output_ids[: minimum - 1])
        assert len(reply.output_ids) >= minimum


def test_logit_bias_bans_and_forces(server: RunningServer) -> None:
    first, commas, forced = (server.ask_once(case).reply.output_ids for case in BIASES)
    assert YES_ID not in first and COMMA_ID not in commas
    assert forced == [COMMA_ID] * BIASES[2].max_new_tokens


def test_grammars_are_kept(server: RunningServer) -> None:
    schema, regex = (server.ask_once(case).reply for case in GRAMMARS)
    car = json.loads(schema.text)
    assert car.keys() == json.loads(CAR_SCHEMA)["properties"].keys()
    assert car["color"] in ("red", "blue") and 0 <= car["wheels"] <= 9
    assert re.fullmatch(VERDICT, regex.text)
    assert schema.ended_by == regex.ended_by == "stop"


@pytest.mark.parametrize("case", LOGPROBS, ids=str)
def test_logprobs_are_plain(server: RunningServer, plain: dict[str, Reply], case: Case) -> None:
    reply = server.ask(case, return_logprob=True)
    if not same_reply(plain[case.name], reply):
        return
    ours, theirs = reply.meta, plain[case.name].meta
    names = ["output_token_logprobs", "output_top_logprobs"]
    names += ["input_token_logprobs", "input_top_logprobs"] if "logprob_start_len" in case.fields else []
    names += ["output_token_ids_logprobs"] if "token_ids_logprob" in case.fields else []
    for name in names:
        assert len(ours[name]) == len(theirs[name]) > 0, name
        for position, (one, other) in enumerate(zip(ours[name], theirs[name], strict=True)):
            same_logprobs(one, other, where=f"{name}, position {position}")


def same_logprobs(ours: Any, theirs: Any, *, where: str) -> None:
    """Compare one entry (logprob, id, text), or a list of them, or nothing (the first input token)."""
    if not theirs:
        assert ours == theirs, where
        return
    pairs = [(ours, theirs)] if not isinstance(theirs[0], list) else list(zip(ours, theirs, strict=True))
    for (one, one_id, _), (other, other_id, _) in pairs:
        assert one_id == other_id, where
        assert one == other or math.isclose(one, other, rel_tol=0, abs_tol=LOGPROB_TOLERANCE), where


def test_sampled_rows_finish_and_leave_greedy_ones_alone(
    server: RunningServer, plain: dict[str, Reply]
) -> None:
    sampled = [
        Case(f"sampled {i}", case.prompt, NUM_SAMPLED, {"temperature": 0.8, "ignore_eos": True, **more})
        for i, (case, more) in enumerate(
            zip(IDENTITY, 2 * ({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}), strict=True)
        )
    ]
    mixed = [case for pair in zip(sampled, IDENTITY, strict=True) for case in pair]
    for reply in server.ask_together(mixed, at_once=16):
        if reply.case in IDENTITY:
            same_reply(plain[reply.case.name], reply)
        else:
            assert len(reply.output_ids) == NUM_SAMPLED and reply.ended_by == "length"


def test_a_sampled_request_with_one_choice_is_greedy(server: RunningServer, plain: dict[str, Reply]) -> None:
    case = IDENTITY[1]
    one_choice = Case(case.name, case.prompt, sampling={"temperature": 0.8, "top_k": 1})
    same_reply(plain[case.name], server.ask(one_choice))
