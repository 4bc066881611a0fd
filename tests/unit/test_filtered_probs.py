"""Filtering against SGLang's own sampler, to the bit, and against a slow reference.

Legend: N rows, M positions, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d3d_sglang import cpu_engine
from d3d_sglang.verify.sampling import filtered_probs

TOP_K_ALL = 1 << 30  # SGLang's value for "no top_k"
# fp32 softmax and sums over at most 64 tokens, in two orders.
PROBS_ATOL = 2e-6
# A sum of fp32 probabilities this near top_p may fall on either side of it in another precision.
TOP_P_MARGIN = 1e-5


@dataclass(frozen=True)
class FilterRows:
    temperatures: torch.Tensor  # [N, 1]
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return filtered_probs(
            logits,
            temperatures=self.temperatures,
            top_ks=self.top_ks,
            top_ps=self.top_ps,
            min_ps=self.min_ps,
        )


@functools.cache
def sglang_sampler() -> Any:
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        cpu_engine.install()
        from sglang.srt.layers import sampler
    return sampler


def sglang_probs(logits: torch.Tensor, rows: FilterRows) -> torch.Tensor:
    """What SGLang's sampler draws from, by its own code: `[N, M, V]`."""
    num_positions = logits.shape[1]
    repeated = [
        x.repeat_interleave(num_positions, dim=0) for x in (rows.temperatures, rows.top_ks, rows.top_ps)
    ]
    probs = torch.softmax(logits.flatten(0, 1).div(repeated[0]), dim=-1)
    _, weights, ids, _ = sglang_sampler().top_k_top_p_min_p_sampling_from_probs_torch(
        probs,
        repeated[1],
        repeated[2],
        rows.min_ps.repeat_interleave(num_positions),
        need_min_p_sampling=True,
        sampling_seed=None,
        positions=torch.zeros(len(probs), dtype=torch.int64),
        return_filtered_probs=True,
    )
    weights = torch.zeros_like(probs).scatter(1, ids.long(), weights)
    return (weights / weights.sum(dim=1, keepdim=True)).view(logits.shape)


def slow_probs(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[float]:
    """One position, in Python floats."""
    largest = max(logits)
    if top_k == 1:
        return [float(i == logits.index(largest)) for i in range(len(logits))]
    weights = [math.exp((x - largest) / temperature) for x in logits]
    probs = [w / sum(weights) for w in weights]
    kept = [0.0] * len(probs)
    before = 0.0
    for rank, i in enumerate(sorted(range(len(probs)), key=lambda i: (-probs[i], i))):
        if rank < top_k and before <= top_p and probs[i] >= min_p * max(probs):
            kept[i] = probs[i]
        before += probs[i]
    return [x / sum(kept) for x in kept]


def filter_rows(*rows: tuple[float, int, float, float]) -> FilterRows:
    temperatures, top_ks, top_ps, min_ps = zip(*rows, strict=True)
    return FilterRows(
        torch.tensor(temperatures).view(-1, 1),
        torch.tensor(top_ks, dtype=torch.int32),
        torch.tensor(top_ps),
        torch.tensor(min_ps),
    )


def random_filters(num_rows: int, vocab_size: int, generator: torch.Generator) -> FilterRows:
    """Each filter off in about a third of the rows."""
    uniform = torch.rand(4, num_rows, generator=generator)
    top_ks = torch.randint(1, vocab_size + 2, (num_rows,), generator=generator)
    off = torch.rand(3, num_rows, generator=generator) < 1 / 3
    return FilterRows(
        (uniform[0] * 2 + 0.05).view(-1, 1),
        torch.where(off[0], TOP_K_ALL, top_ks).to(torch.int32),
        torch.where(off[1], 1.0, uniform[1]),
        torch.where(off[2], 0.0, uniform[2]),
    )


def test_filter_equals_sglang() -> None:
    generator = torch.Generator().manual_seed(0)
    for vocab_size in (2, 3, 17, 64):
        logits = torch.randn(200, 3, vocab_size, generator=generator) * 3
        rows = random_filters(200, vocab_size, generator)
        # The same operations on the same numbers: not even the support may differ.
        torch.testing.assert_close(rows.apply(logits), sglang_probs(logits, rows), rtol=0, atol=0)


def test_filter_equals_sglang_where_probabilities_are_equal() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(0, 3, (300, 2, 16), generator=generator).float()
    rows = random_filters(300, 16, generator)
    torch.testing.assert_close(rows.apply(logits), sglang_probs(logits, rows), rtol=0, atol=0)


def test_filter_equals_sglang_on_a_large_vocabulary() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 2, 49_152, generator=generator) * 4
    rows = filter_rows(
        (1.0, TOP_K_ALL, 0.9, 0.0), (0.7, 50, 1.0, 0.0), (1.3, 200, 0.95, 0.02), (1.0, 1, 1.0, 0.0)
    )
    torch.testing.assert_close(rows.apply(logits), sglang_probs(logits, rows), rtol=0, atol=0)


@given(st.data())
def test_filter_equals_the_slow_one(data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(1, 12))
    logit = st.integers(-40, 40).map(lambda x: x / 8)
    logits = torch.tensor(
        data.draw(st.lists(st.lists(logit, min_size=vocab_size, max_size=vocab_size), min_size=1, max_size=3))
    )  # [M, V]
    temperature = data.draw(st.sampled_from([0.25, 1.0, 2.0]))
    top_k = data.draw(st.one_of(st.integers(1, vocab_size + 1), st.just(TOP_K_ALL)))
    top_p = data.draw(st.one_of(st.just(2.0), st.integers(1, 100).map(lambda x: x / 100)))
    min_p = data.draw(st.sampled_from([0.0, 0.0, 0.0999, 0.3001]))
    # Away from edges that rounding decides; the tests against SGLang's code include them.
    edges = torch.softmax(logits.double() / temperature, dim=1).sort(descending=True).values.cumsum(dim=1)
    if (edges - top_p).abs().min() < TOP_P_MARGIN:
        top_p = 2.0  # off
    got = filter_rows((temperature, top_k, top_p, min_p)).apply(logits[None])[0]
    for position, probs in zip(logits.tolist(), got.tolist(), strict=True):
        assert probs == pytest.approx(slow_probs(position, temperature, top_k, top_p, min_p), abs=PROBS_ATOL)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "num_kept"),
    # Of four equal tokens, of 1/4 each; the sums before them are 0, 1/4, 1/2 and 3/4, exactly.
    [
        (2, 1.0, 0.0, 2),
        (3, 1.0, 0.0, 3),
        (4, 1.0, 0.0, 4),
        (TOP_K_ALL, 0.49, 0.0, 2),
        (TOP_K_ALL, 0.5, 0.0, 3),
        (3, 0.25, 0.0, 2),
        (2, 0.5, 1.0, 2),
        (TOP_K_ALL, 1.0, 1.0, 4),
    ],
)
def test_edges_of_the_filters(top_k: int, top_p: float, min_p: float, num_kept: int) -> None:
    probs = filter_rows((1.0, top_k, top_p, min_p)).apply(torch.zeros(1, 1, 4))
    kept = torch.arange(4) < num_kept
    torch.testing.assert_close(probs[0, 0], kept / num_kept, rtol=0, atol=PROBS_ATOL)


def test_a_filter_no_row_uses_can_be_left_out() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 2, 32, generator=generator)
    off = filter_rows(*[(0.5, TOP_K_ALL, 1.0, 0.0)] * 5)
    whole = off.apply(logits)
    for left_out in itertools.product((True, False), repeat=3):
        names = ("top_ks", "top_ps", "min_ps")
        filters = {
            name: None if out else getattr(off, name) for name, out in zip(names, left_out, strict=True)
        }
        got = filtered_probs(logits, temperatures=off.temperatures, **filters)
        torch.testing.assert_close(got, whole, rtol=0, atol=PROBS_ATOL)


def test_greedy_rows_are_certain_of_the_argmax() -> None:
    """Also where temperature would make two logits equal, and for logits that are equal."""
    logits = torch.tensor([[[0.0, 1.0, 1.0, -5.0]], [[1.0, 1.0 + 2**-23, 0.0, 0.0]], [[0.0, 0.0, 0.0, 2.0]]])
    kept = logits.clone()
    rows = filter_rows((1.0, 1, 1.0, 0.0), (50.0, 1, 0.3, 0.5), (1.0, TOP_K_ALL, 1.0, 0.0))
    probs = rows.apply(logits)
    assert probs[:2, 0].tolist() == [[0, 1, 0, 0], [0, 1, 0, 0]]
    assert (probs[2] > 0).all()
    assert torch.equal(logits, kept)


def test_filter_takes_half_precision_and_ruled_out_tokens() -> None:
    logits = torch.tensor([[[1.0, -math.inf, 1.0, 0.0]]], dtype=torch.bfloat16)
    probs = filter_rows((1.0, TOP_K_ALL, 1.0, 0.0)).apply(logits)
    assert probs.dtype == torch.float32
    assert probs[0, 0].tolist() == pytest.approx(slow_probs([1.0, -math.inf, 1.0, 0.0], 1.0, 9, 1.0, 0.0))


def test_a_row_does_not_notice_its_batch() -> None:
    logits = torch.randn(6, 4, 50, generator=torch.Generator().manual_seed(4))
    rows = random_filters(6, 50, torch.Generator().manual_seed(5))
    together = rows.apply(logits)
    for n in range(6):
        own = slice(n, n + 1)
        alone = FilterRows(rows.temperatures[own], rows.top_ks[own], rows.top_ps[own], rows.min_ps[own])
        assert torch.equal(alone.apply(logits[own])[0], together[n])


def test_reads_no_values() -> None:
    # Meta tensors have no values: any host read raises.
    row = torch.zeros(3, device="meta")
    rows = FilterRows(row[:, None], row.int(), row, row)
    assert rows.apply(torch.zeros(3, 5, 9, device="meta")).shape == (3, 5, 9)
