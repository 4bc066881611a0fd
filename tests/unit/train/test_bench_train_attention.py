"""The benchmark of training attention: its rows, its figures, and that a wrong kernel is never timed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.train_attention import CASES, gradient_errors, measure, metrics_of
from bench.train_attention_cases import SMOLLM2, Setting, real_tokens, shrunk, training_layout, visible_pairs
from d3d_sglang.masks import dense_mask
from train.attention import register
from train.attention.sdpa import SdpaPlan

CPU = torch.device("cpu")
SETTING = Setting(CPU, torch.float32, ("sdpa",), repeats=3, seconds=1e-6, steps_per_wait=1)


def test_rows_are_what_they_are_counted_as() -> None:
    case = replace(CASES[0], num_rows=3, context_len=100, num_blocks=70)  # more blocks than some rows have
    layout = training_layout(case, CPU)
    real, mask = real_tokens(layout), dense_mask(layout, max_prefix=0)
    assert visible_pairs(layout) == mask[real].sum()
    assert (mask[~real].sum(1) == 1).all() and not real.all()
    assert not (mask & ~real[:, None])[real].any()  # nothing real sees padding
    for ctx in layout.ctx[:, 100::16]:
        anchors = ctx[ctx > 0]
        assert (anchors.diff() > 0).all() and anchors.min() >= 25


def test_wrong_gradients_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shrunk(CASES[0]).shape
    assert max(gradient_errors(shape, SETTING)["sdpa"].values()) < 1e-5
    attend = SdpaPlan.attend

    def detached(plan: SdpaPlan, *inputs: torch.Tensor, scaling: float) -> torch.Tensor:
        query, key, value = inputs
        if value.dtype == torch.float32:
            value = value + (value.detach() - value) * 0.01  # right forward, gradient 1% off
        return attend(plan, query, key, value, scaling=scaling)

    monkeypatch.setattr(SdpaPlan, "attend", detached)
    with pytest.raises(SystemExit, match="gradients of sdpa are wrong"):
        gradient_errors(shape, SETTING)


def test_metrics() -> None:
    case = shrunk(CASES[0])
    runs = [
        {"case": case.name, "name": name, "ms": ms}
        for name, times in {"sdpa": (6, 8, 9), "flex": (2, 4, 9), "triton": (2, 2, 3)}.items()
        for ms in times
    ] + [{"case": case.name, "name": name, "plan_ms": 1.0} for name in ("sdpa", "flex", "triton")]
    metrics = metrics_of(runs, [case], CPU)
    assert metrics[f"{case.name}_triton_ms"] == 2
    assert metrics[f"{case.name}_triton_speed_vs_sdpa"] == 4
    assert metrics[f"{case.name}_triton_speed_vs_flex"] == 2
    assert metrics[f"{case.name}_flex_speed_vs_sdpa"] == 2
    num_real = int(real_tokens(training_layout(case, CPU)).sum())
    assert metrics[f"{case.name}_sdpa_tokens_per_s"] == num_real * 125


@pytest.mark.parametrize("kind", ["layer", "stack"])
def test_every_implementation_has_its_turns(kind: str) -> None:
    case = shrunk(next(case for case in CASES if case.kind == kind and case.shape == SMOLLM2))
    register()
    runs = list(measure(case, SETTING))
    assert [run.get("repeat") for run in runs] == [0, 1, 2, None]
    assert all(run["case"] == case.name and run["name"] == "sdpa" for run in runs)
