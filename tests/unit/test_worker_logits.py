"""The worker changes the target's logits exactly as plain decoding does, at every position of a block.

Penalties, minimum lengths, logit bias, seeded sampling and logprobs, in batches that mix rows with and
without them. The reference decodes one token a step and applies the definitions in plain Python.

Legend: N rows, B block size, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from tests.unit.scripted_pair import VOCAB_SIZE, next_logits, plain_decode
from tests.unit.worker_session import Session

pytestmark = pytest.mark.parametrize("mode", ["sync", "async"])
PROMPTS = ([3, 1, 4, 1, 5], [9], list(range(20, 43)), [2, 7, 1, 8, 2, 8])
EOS_ID, STOP_ID = 11, 23
NUM_ROUNDS = 12
# fp32 log-softmax of the same logits in another order of sums; values are below 10.
LOGPROB_ATOL = 1e-5

Mode = Literal["sync", "async"]
Choose = Callable[[torch.Tensor, list[int]], int]  # logits [V] and the output so far -> token


def decode(prompt: Sequence[int], first_token: int, num_tokens: int, choose: Choose) -> list[int]:
    """Plain decoding of `num_tokens`, the first of them given."""
    output = [first_token]
    while len(output) < num_tokens:
        output.append(choose(next_logits([*prompt, *output]).clone(), output))
    return output


def penalised(
    *, frequency: float = 0.0, presence: float = 0.0, repetition: float = 1.0, min_new_tokens: int = 0
) -> Choose:
    """Greedy with the penalties of the API, token by token."""

    def choose(logits: torch.Tensor, output: list[int]) -> int:
        for token, count in Counter(output).items():
            logits[token] -= count * frequency + presence
        if len(output) < min_new_tokens:
            logits[[EOS_ID, STOP_ID]] = float("-inf")
        for token in set(output):
            logits[token] *= repetition if logits[token] < 0 else 1 / repetition
        return int(logits.argmax())

    return choose


def biased(bias: torch.Tensor) -> Choose:
    return lambda logits, output: int((logits + bias).argmax())


def greedy(logits: torch.Tensor, output: list[int]) -> int:
    return int(logits.argmax())


def sampled(prompt_len: int, *, seed: int, temperature: float) -> Choose:
    """One draw that depends on seed and position alone; the position of a token is that of the one before."""
    return lambda logits, output: draw(
        logits, seed=seed, temperature=temperature, position=prompt_len + len(output) - 1
    )


def draw(logits: torch.Tensor, *, seed: int, temperature: float, position: int) -> int:
    generator = torch.Generator().manual_seed(10_000 * seed + position)
    return int(torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator))


class SeededSampler:
    """Stands in for SGLang's sampler: takes the rows' parameters, uses up the logits it is given."""

    def __call__(
        self, output: Any, sampling: Any, *_args: Any, positions: torch.Tensor, **_kwargs: Any
    ) -> torch.Tensor:
        logits = output.next_token_logits
        assert logits.shape[0] == len(positions) == len(sampling.temperatures) == len(sampling.top_ks)
        assert sampling.logit_bias is None, "the bias was already added"
        tokens = []
        for i, position in enumerate(positions.tolist()):
            temperature = float(sampling.temperatures[i])
            seed = int(sampling.sampling_seed[i])
            is_greedy = int(sampling.top_ks[i]) == 1
            tokens.append(
                int(logits[i].argmax())
                if is_greedy
                else draw(logits[i], seed=seed, temperature=temperature, position=position)
            )
        logits.fill_(float("nan"))
        return torch.tensor(tokens, dtype=torch.int32)


def with_penalties(batch: Any) -> None:
    """SGLang's own sums under overlap: one step late, so only their presence may be used."""
    batch.sampling_info.acc_additive_penalties = torch.full((len(batch.reqs), VOCAB_SIZE), float("nan"))


def run(session: Session, reqs: Sequence[Any], change: Callable[[Any], None]) -> None:
    session.admit(*reqs)
    for _ in range(NUM_ROUNDS):
        session.round(change)


def assert_decoded(session: Session, req: Any, choose: Choose) -> None:
    output = session.output(req)
    assert output == decode(req.origin_input_ids, output[0], len(output), choose)


PENALTIES = [
    {"frequency": 0.8},
    {"presence": 1.5},
    {"repetition": 1.7},
    {"min_new_tokens": 20},
    {"frequency": 0.3, "presence": 0.4, "repetition": 1.3, "min_new_tokens": 9},
]


def penalised_request(session: Session, prompt: Sequence[int], penalties: dict[str, Any]) -> Any:
    names = {name: f"{name}_penalty" for name in ("frequency", "presence", "repetition")}
    sampling = {names.get(name, name): value for name, value in penalties.items()}
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=EOS_ID)
    return session.request(prompt, tokenizer=tokenizer, stop_token_ids=[STOP_ID], **sampling)


@pytest.mark.parametrize("penalties", PENALTIES, ids=lambda penalties: "+".join(penalties))
def test_penalties_are_those_of_plain_decoding(mode: Mode, penalties: dict[str, Any]) -> None:
    session = Session(mode=mode)
    plain = session.request(PROMPTS[1])
    reqs = [penalised_request(session, prompt, penalties) for prompt in (PROMPTS[0], PROMPTS[2], PROMPTS[3])]
    run(session, [reqs[0], plain, *reqs[1:]], with_penalties)
    for req in reqs:
        assert_decoded(session, req, penalised(**penalties))
    assert_decoded(session, plain, greedy)
    outputs = [session.output(req) for req in reqs]
    unchanged = [plain_decode(req.origin_input_ids, len(out)) for req, out in zip(reqs, outputs, strict=True)]
    assert outputs != unchanged, "the penalties changed nothing: the test shows nothing"
    assert any(r.accept_len > 0 for req in reqs for r in session.rounds[req.rid])


def test_penalties_go_on_after_a_retraction(mode: Mode) -> None:
    session = Session(mode=mode)
    req = penalised_request(session, PROMPTS[0], {"frequency": 0.8, "min_new_tokens": 30})
    run(session, [req], with_penalties)
    session.leave(req)
    session.admit(req)  # the next token is the target's business, not the worker's
    already = len(req.output_ids) + 1
    for _ in range(NUM_ROUNDS):
        session.round(with_penalties)
    session.leave(req)  # delivers what was late
    output = list(req.output_ids)
    assert len(output) >= already + NUM_ROUNDS
    choose = penalised(frequency=0.8, min_new_tokens=30)
    for i in range(already, len(output)):
        assert output[i] == choose(next_logits([*PROMPTS[0], *output[:i]]).clone(), output[:i])


@pytest.mark.parametrize("penalties", [{}, {"frequency": 0.8}])
def test_penalties_start_anew_with_the_next_request_in_a_row(mode: Mode, penalties: dict[str, Any]) -> None:
    session = Session(mode=mode, num_requests=1)
    before = penalised_request(session, PROMPTS[0], {"frequency": 0.8, "min_new_tokens": 500})
    run(session, [before], with_penalties)
    session.leave(before)
    req = penalised_request(session, PROMPTS[1], penalties)
    run(session, [req], with_penalties)
    assert_decoded(session, req, penalised(**penalties))


@pytest.mark.parametrize("min_new_tokens", [1, 2, 3, 7, 12])
def test_stop_tokens_are_kept_back_for_exactly_the_minimum(mode: Mode, min_new_tokens: int) -> None:
    """The bias makes a stop token the first choice wherever it is allowed."""
    session = Session(mode=mode)
    req = penalised_request(session, PROMPTS[2], {"min_new_tokens": min_new_tokens})
    bias = torch.zeros(1, VOCAB_SIZE)
    bias[0, STOP_ID] = 50.0

    def with_bias(batch: Any) -> None:
        with_penalties(batch)
        batch.sampling_info.logit_bias = bias.clone()

    run(session, [req], with_bias)
    output = session.output(req)
    first_stop = max(min_new_tokens, 1)  # the first token is the prefill's
    assert output[1:first_stop] == plain_decode([*PROMPTS[2], output[0]], first_stop - 1)
    assert set(output[first_stop:]) == {STOP_ID}


def test_logit_bias_is_added_at_every_position(mode: Mode) -> None:
    bias = torch.zeros(4, VOCAB_SIZE)
    bias[0, 7], bias[2, 13], bias[2, 30] = 2.0, 1.5, -100.0
    session = Session(mode=mode)
    reqs = [session.request(prompt) for prompt in PROMPTS]

    def with_bias(batch: Any) -> None:
        batch.sampling_info.logit_bias = bias.clone()

    run(session, reqs, with_bias)
    for req, row in zip(reqs, bias, strict=True):
        assert_decoded(session, req, biased(row))
    assert session.output(reqs[0]) != plain_decode(PROMPTS[0], len(session.output(reqs[0])))
    assert 30 not in session.output(reqs[2])[1:]


def with_sampling(*, temperatures: Sequence[float], seeds: Sequence[int] | None) -> Callable[[Any], None]:
    """Rows sample at their temperature, 0 for greedy, as SGLang writes it; it has seeds if deterministic."""

    def change(batch: Any) -> None:
        sampling = batch.sampling_info
        sampling.is_all_greedy = False
        sampling.need_top_k_sampling = True
        sampling.temperatures = torch.tensor([t or 1.0 for t in temperatures])[:, None]
        sampling.top_ks = torch.tensor([VOCAB_SIZE if t else 1 for t in temperatures], dtype=torch.int32)
        sampling.sampling_seed = None if seeds is None else torch.tensor(seeds)

    return change


def test_sampled_and_greedy_rows_mix_if_drafts_are_greedy(mode: Mode) -> None:
    session = Session(mode=mode, draft_sampling="greedy")
    session.worker._choice._sampler = SeededSampler()
    reqs = [session.request(prompt) for prompt in PROMPTS]
    temperatures, seeds = [0, 0.7, 0, 1.3], [0, 5, 0, 6]
    run(session, reqs, with_sampling(temperatures=temperatures, seeds=seeds))
    for i, req in enumerate(reqs):
        t = temperatures[i]
        assert_decoded(session, req, sampled(len(PROMPTS[i]), seed=seeds[i], temperature=t) if t else greedy)
    drawn = session.output(reqs[1])
    assert drawn != plain_decode(PROMPTS[1], len(drawn)), "nothing was sampled"


def outputs_of_sampled(
    mode: Mode,
    prompts: Sequence[Sequence[int]],
    *,
    temperatures: Sequence[float],
    seeds: Sequence[int | None],
) -> list[list[int]]:
    session = Session(mode=mode)
    reqs = [session.request(prompt, sampling_seed=seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    run(session, reqs, with_sampling(temperatures=temperatures, seeds=None))
    return [session.output(req) for req in reqs]


def test_a_sampled_row_depends_on_its_seed_and_on_no_other_row(mode: Mode) -> None:
    temperatures, seeds = [0, 0.7, 0, 1.3], [None, 5, None, 6]
    together = outputs_of_sampled(mode, PROMPTS, temperatures=temperatures, seeds=seeds)
    for i, output in enumerate(together):
        (alone,) = outputs_of_sampled(
            mode, PROMPTS[i : i + 1], temperatures=temperatures[i : i + 1], seeds=seeds[i : i + 1]
        )
        assert alone == output
        is_plain = output == plain_decode(PROMPTS[i], len(output))
        assert is_plain == (temperatures[i] == 0)
    for other in (7, None):
        (reseeded,) = outputs_of_sampled(mode, PROMPTS[1:2], temperatures=[0.7], seeds=[other])
        assert reseeded != together[1]


@pytest.mark.parametrize("temperatures", [(0, 0), (0.7, 0)])
def test_logprobs_are_the_targets(mode: Mode, temperatures: tuple[float, float]) -> None:
    """Those of what was sampled from: SGLang divides by the temperature first."""
    session = Session(mode=mode)
    reqs = [session.request(prompt) for prompt in PROMPTS[:2]]
    session.admit(*reqs)

    def with_logprobs(batch: Any) -> None:
        batch.return_logprob = True
        if any(temperatures):
            with_sampling(temperatures=temperatures, seeds=[0, 0])(batch)

    for _ in range(5):
        before = [[*req.origin_input_ids, *session.output(req)] for req in reqs]
        result = session.round(with_logprobs)
        logprobs = result.logits_output.next_token_logprobs  # [N, B]
        for i, req in enumerate(reqs):
            tokens = [*req.origin_input_ids, *session.output(req)]
            for j, at in enumerate(range(len(before[i]), len(tokens))):
                logits = next_logits(tokens[:at]) / (temperatures[i] or 1.0)
                expected = logits.log_softmax(dim=-1)[tokens[at]]
                assert float(logprobs[i, j]) == pytest.approx(float(expected), abs=LOGPROB_ATOL)
