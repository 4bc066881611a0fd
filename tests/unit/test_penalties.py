"""Block penalties against two references that go token by token: plain arithmetic and SGLang's penalizers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d3d_sglang.verify.penalties import apply_block_penalties, apply_min_new_tokens, update_counts

VOCAB_SIZE = 6
BLOCK_SIZE = 4
# At most twelve fp32 roundings of numbers below 128, nearly all of them below 32 (2^-20 each): the slow
# references work in fp64, or add up a frequency once per token where ours multiplies.
FP32_ATOL = 3e-5

PENALTY = st.integers(-16, 16).map(lambda i: i / 8)  # dyadic: sums and products are exact in fp32
REPETITION = st.sampled_from([0.5, 0.9, 1.0, 1.1, 1.7, 2.0])
TOKEN = st.integers(0, VOCAB_SIZE - 1)


# The references go token by token: fewer examples than usual keep the file within seconds.
cases = settings(max_examples=60)


@dataclass(frozen=True)
class Row:
    """One request: its parameters, what it has output, what is being verified."""

    frequency: float
    presence: float
    repetition: float
    min_new_tokens: int
    stop_ids: list[int]
    output: list[int]
    candidates: list[int]


ROW = st.builds(
    Row,
    frequency=PENALTY,
    presence=PENALTY,
    repetition=REPETITION,
    min_new_tokens=st.integers(0, 8),
    stop_ids=st.lists(TOKEN, max_size=2, unique=True),
    output=st.lists(TOKEN, min_size=1, max_size=6),
    candidates=st.lists(TOKEN, min_size=BLOCK_SIZE - 1, max_size=BLOCK_SIZE - 1),
)
ROWS = st.lists(ROW, min_size=1, max_size=3)


def random_logits(num_rows: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(num_rows, BLOCK_SIZE, VOCAB_SIZE, generator=generator)).to(dtype)


def column(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def counts_of(rows: list[Row]) -> torch.Tensor:
    return torch.stack([torch.bincount(torch.tensor(r.output), minlength=VOCAB_SIZE) for r in rows]).int()


def penalised(logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """The functions under test, all penalties on."""
    logits = logits.clone()
    stop = torch.zeros(len(rows), VOCAB_SIZE)
    for i, row in enumerate(rows):
        stop[i, row.stop_ids] = float("-inf")
    apply_min_new_tokens(
        logits,
        num_output=torch.tensor([len(r.output) for r in rows]),
        min_new_tokens=torch.tensor([[r.min_new_tokens] for r in rows]),
        stop_token_penalties=stop,
    )
    apply_block_penalties(
        logits,
        counts=counts_of(rows),
        draft_tokens=torch.tensor([r.candidates for r in rows]),
        frequency=column([r.frequency for r in rows]),
        presence=column([r.presence for r in rows]),
        repetition=column([r.repetition for r in rows]),
    )
    return logits


def one_by_one(logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """Every logit on its own, in Python floats, from the list of tokens output before it."""
    result = logits.double()
    for i, row in enumerate(rows):
        for j in range(BLOCK_SIZE):
            output = row.output + row.candidates[:j]
            for token in range(VOCAB_SIZE):
                x = float(result[i, j, token])
                if token in output:
                    x -= output.count(token) * row.frequency + row.presence
                if token in row.stop_ids and len(output) < row.min_new_tokens:
                    x = float("-inf")
                if token in output:
                    x = x * row.repetition if x < 0 else x / row.repetition
                result[i, j, token] = x
    return result


@cases
@given(rows=ROWS, seed=st.integers(0, 100))
def test_equals_one_by_one(rows: list[Row], seed: int) -> None:
    logits = random_logits(len(rows), seed=seed)
    expected = one_by_one(logits, rows)
    torch.testing.assert_close(penalised(logits, rows).double(), expected, atol=FP32_ATOL, rtol=0)


@dataclass
class FakeBatch:
    """What the penalizers read of a batch."""

    reqs: list[SimpleNamespace]
    device: str = "cpu"


def sglang_penalised(logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """SGLang 0.5.23's penalizers fed one token a step, and applied as its sampler applies them."""
    penaltylib = pytest.importorskip("sglang.srt.sampling.penaltylib")
    from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

    reqs = [
        SimpleNamespace(
            sampling_params=SimpleNamespace(
                frequency_penalty=r.frequency,
                presence_penalty=r.presence,
                repetition_penalty=r.repetition,
                min_new_tokens=r.min_new_tokens,
                stop_token_ids=set(r.stop_ids),
            ),
            eos_token_ids=None,
            tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=None),
        )
        for r in rows
    ]
    kinds = ("Frequency", "MinNewTokens", "Presence", "Repetition")
    penalizers = {getattr(penaltylib, f"Batched{kind}Penalizer") for kind in kinds}
    result = logits.clone()
    for i, row in enumerate(rows):
        # Rows have outputs of different lengths: each is driven in a batch of its own.
        batch = FakeBatch(reqs=[reqs[i]])
        orchestrator = penaltylib.BatchedPenalizerOrchestrator(VOCAB_SIZE, batch, penalizers)
        for token in row.output:
            orchestrator.cumulate_output_tokens(torch.tensor([token]))
        for j in range(BLOCK_SIZE):
            if j > 0:
                orchestrator.cumulate_output_tokens(torch.tensor([row.candidates[j - 1]]))
            additive = torch.zeros(1, VOCAB_SIZE)
            orchestrator.accumulate_additive_penalties(additive)
            step_logits = result[i, j][None]
            step_logits.add_(additive)
            scaling = orchestrator.accumulate_scaling_penalties()
            if scaling is not None:
                with torch.compiler.set_stance("force_eager"):
                    apply_scaling_penalties(step_logits, scaling)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@cases
@given(rows=ROWS, seed=st.integers(0, 100))
def test_equals_sglang_bit_for_bit(dtype: torch.dtype, rows: list[Row], seed: int) -> None:
    logits = random_logits(len(rows), seed=seed, dtype=dtype)
    assert torch.equal(penalised(logits, rows), sglang_penalised(logits, rows))


@cases
@given(rows=ROWS, frequency=st.floats(-2, 2, width=32))
def test_equals_sglang_for_any_frequency(rows: list[Row], frequency: float) -> None:
    # SGLang adds the frequency up token by token, we multiply: equal but for rounding.
    rows = [Row(**{**vars(row), "frequency": frequency, "repetition": 1.0}) for row in rows]
    logits = random_logits(len(rows))
    torch.testing.assert_close(
        penalised(logits, rows), sglang_penalised(logits, rows), atol=FP32_ATOL, rtol=0
    )


@cases
@given(rows=ROWS, present=st.sets(st.sampled_from(["frequency", "presence", "repetition"])))
def test_none_leaves_a_penalty_out(rows: list[Row], present: set[str]) -> None:
    neutral = {"frequency": 0.0, "presence": 0.0, "repetition": 1.0}
    kwargs = {name: column([getattr(r, name) for r in rows]) if name in present else None for name in neutral}
    logits = random_logits(len(rows))
    ours = logits.clone()
    apply_block_penalties(
        ours, counts=counts_of(rows), draft_tokens=torch.tensor([r.candidates for r in rows]), **kwargs
    )
    absent = {name: value for name, value in neutral.items() if name not in present} | {"min_new_tokens": 0}
    expected = one_by_one(logits, [Row(**{**vars(row), **absent}) for row in rows])
    torch.testing.assert_close(ours.double(), expected, atol=FP32_ATOL, rtol=0)


@cases
@given(rows=ROWS, start=st.integers(1, BLOCK_SIZE - 1), token=TOKEN)
def test_later_candidates_do_not_matter(rows: list[Row], start: int, token: int) -> None:
    """Row j depends on candidates 1..j only: what is penalised is known when the row is judged."""
    logits = random_logits(len(rows))
    changed = [
        Row(**{**vars(r), "candidates": r.candidates[: start - 1] + [token] * (BLOCK_SIZE - start)})
        for r in rows
    ]
    assert torch.equal(penalised(logits, rows)[:, :start], penalised(logits, changed)[:, :start])


@cases
@given(rows=ROWS, data=st.data())
def test_update_counts_adds_committed_tokens(rows: list[Row], data: st.DataObject) -> None:
    accept_len = [data.draw(st.integers(0, BLOCK_SIZE - 1)) for _ in rows]
    out = [[*row.candidates, row.output[0]] for row in rows]
    counts = torch.zeros(5, VOCAB_SIZE, dtype=torch.int32)
    index = torch.tensor([4, 0, 2])[: len(rows)]
    counts[index] = counts_of(rows)
    update_counts(counts, index, torch.tensor(out), accept_len=torch.tensor(accept_len))
    for i, row in enumerate(rows):
        tokens = row.output + out[i][: accept_len[i] + 1]
        assert counts[index[i]].tolist() == [tokens.count(token) for token in range(VOCAB_SIZE)]
    untouched = [i for i in range(5) if i not in index.tolist()]
    assert not counts[untouched].any()


def test_reads_no_values() -> None:
    # Meta tensors have no values: any host read raises.
    logits = torch.zeros(2, BLOCK_SIZE, VOCAB_SIZE, device="meta")
    counts = torch.zeros(2, VOCAB_SIZE, dtype=torch.int32, device="meta")
    tokens = torch.zeros(2, BLOCK_SIZE, dtype=torch.int64, device="meta")
    scalar = torch.zeros(2, 1, device="meta")
    apply_block_penalties(
        logits,
        counts=counts,
        draft_tokens=tokens[:, 1:],
        frequency=scalar,
        presence=scalar,
        repetition=scalar,
    )
    apply_min_new_tokens(
        logits, num_output=tokens[:, 0], min_new_tokens=tokens[:, :1], stop_token_penalties=counts.float()
    )
    update_counts(counts, tokens[:, 0], tokens, accept_len=tokens[:, 0])
