"""What a training run's lines become in its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.train_smollm2 import read_curve, tau_metrics, training_metrics


def line(step: int, seconds: float, **figures: Any) -> dict[str, Any]:
    """A line of a run that sees 2 examples a second unless told otherwise."""
    known = {"kind": "train", "examples_per_second": 2.0, "tokens_per_second": 100.0, "mfu": 0.1}
    return known | {"step": step, "seconds": seconds} | figures


def write(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.joinpath("metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


def test_means_are_over_time_and_leave_the_warm_up_out() -> None:
    curve = [
        line(10, 50.0, mfu=0.01),
        line(20, 60.0),
        line(30, 70.0, mfu=0.2, tokens_per_second=200.0),
        line(40, 100.0, mfu=0.4, tokens_per_second=400.0),
    ]
    metrics = training_metrics(curve)
    assert metrics["mfu"] == pytest.approx((10 * 0.2 + 30 * 0.4) / 40)
    assert metrics["tokens_per_s"] == pytest.approx((10 * 200 + 30 * 400) / 40)
    assert metrics["examples"] == 200
    assert metrics["minutes"] == pytest.approx(1.67)
    assert metrics["steps"] == 40
    assert "tau_dev" not in metrics


def test_a_step_logged_again_counts_once_and_the_best_tau_is_kept(tmp_path: Path) -> None:
    again = line(30, 71.0, mfu=0.3)
    taus = [{"kind": "validation", "step": step, "tau": tau} for step, tau in ((20, 2.5), (30, 2.25))]
    curve = read_curve(write(tmp_path, [line(20, 60.0), line(30, 70.0, mfu=0.9), *taus, again]))
    assert [(x["kind"], x["step"]) for x in curve] == [
        ("train", 20),
        ("validation", 20),
        ("train", 30),
        ("validation", 30),
    ]
    assert training_metrics(curve)["mfu"] == pytest.approx(0.3)
    assert training_metrics(curve)["tau_dev"] == 2.5


@pytest.mark.parametrize(
    ("lines", "message"), [(None, "has no metrics.jsonl"), ([line(10, 50.0)], "nothing after step 20")]
)
def test_a_folder_without_a_usable_curve_is_refused(
    tmp_path: Path, lines: list[dict[str, Any]] | None, message: str
) -> None:
    if lines is not None:
        write(tmp_path, lines)
    with pytest.raises(ValueError, match=message):
        read_curve(tmp_path)


def test_tau_is_listed_by_set() -> None:
    sets = {"gsm8k": {"sync": {"tau": 3.25}}, "mbpp": {"sync": {"tau": 2.75}}}
    measured = {"tau_mean": 3.0, "tau_async_mean": 2.9, "hit_rate_mean": 0.5, "sets": sets}
    expected = {
        "tau_mean": 3.0,
        "tau_async_mean": 2.9,
        "hit_rate_mean": 0.5,
        "tau_gsm8k": 3.25,
        "tau_mbpp": 2.75,
    }
    assert tau_metrics(measured) == expected
