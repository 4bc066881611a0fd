"""The record of a finished SmolLM2 training run: tau on the benchmark sets, learning curve, throughput.

    python -m bench.train_smollm2 --run runs/smollm2-135m --answers data/smollm2

Takes the run folder of `train.run` and the greedy answers of `bench.smollm2_answers`, measures the best
drafter with `train.evaluate` on every set, and writes bench/results/NAME.json. Curve and speeds are the
run's own lines of metrics.jsonl; MFU and tokens per second are means over time after the first
`WARM_UP_STEPS` steps, in which the model is compiled. How much faster each training attention is stands in
train_attention.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.result import make_result, write_result
from bench.smollm2_answers import SETS, run_module

WARM_UP_STEPS = 20


def read_curve(run: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl in the order of steps; of a step logged again after a resume, the last.

    Raises:
        ValueError: the folder is not that of a run, or nothing was logged after the warm-up.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"--run is {run}: it has no metrics.jsonl, give the `out` folder of train.run")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    latest = {(line["step"], line["kind"]): line for line in lines}
    curve = [latest[key] for key in sorted(latest)]
    if not any(line["kind"] == "train" and line["step"] > WARM_UP_STEPS for line in curve):
        raise ValueError(f"--run is {run}: it logged nothing after step {WARM_UP_STEPS}")
    return curve


def training_metrics(curve: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Throughput over time, examples seen, minutes of training, and the best tau on development answers."""
    train = [line for line in curve if line["kind"] == "train"]
    spans = [
        (later["seconds"] - earlier["seconds"], later)
        for earlier, later in pairwise(train)
        if earlier["step"] >= WARM_UP_STEPS
    ]
    total = sum(seconds for seconds, _ in spans)

    def over_time(name: str) -> float:
        return sum(seconds * (line[name] or 0.0) for seconds, line in spans) / total

    seen = train[0]["examples_per_second"] * train[0]["seconds"]
    seen += sum(
        (later["seconds"] - earlier["seconds"]) * later["examples_per_second"]
        for earlier, later in pairwise(train)
    )
    metrics = {
        "mfu": round(over_time("mfu"), 4),
        "tokens_per_s": round(over_time("tokens_per_second")),
        "examples": round(seen),
        "minutes": round(train[-1]["seconds"] / 60, 2),
        "steps": train[-1]["step"],
    }
    taus = [line["tau"] for line in curve if line["kind"] == "validation"]
    return metrics | ({"tau_dev": round(max(taus), 4)} if taus else {})


def measure_tau(drafter: Path, answers: Path, *, flags: Sequence[str]) -> dict[str, Any]:
    """What `train.evaluate` says of a drafter on every benchmark set.

    Raises:
        subprocess.CalledProcessError: it failed; it has said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "tau.json")
        files = [part for name in SETS for part in ("--answers", str(answers / f"{name}.jsonl"))]
        run_module("train.evaluate", "--drafter", str(drafter), *files, *flags, "--out", str(out))
        content: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return content


def tau_metrics(measured: Mapping[str, Any]) -> dict[str, float]:
    """tau and hit rate, means over the sets and by set."""
    metrics = {
        "tau_mean": round(measured["tau_mean"], 4),
        "tau_async_mean": round(measured["tau_async_mean"], 4),
        "hit_rate_mean": round(measured["hit_rate_mean"], 4),
    }
    return metrics | {f"tau_{name}": round(of["sync"]["tau"], 4) for name, of in measured["sets"].items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.train_smollm2", description="Record a finished SmolLM2 training run."
    )
    parser.add_argument("--run", type=Path, required=True, help="`out` folder of train.run")
    parser.add_argument("--answers", type=Path, required=True, help="folder of bench.smollm2_answers")
    parser.add_argument("--name", default="train_smollm2", help="of the record (default: %(default)s)")
    parser.add_argument("evaluate_args", nargs="*", help="further arguments of train.evaluate, after --")
    args = parser.parse_args(argv)
    try:
        curve = read_curve(args.run)
        measured = measure_tau(args.run / "best", args.answers, flags=args.evaluate_args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"error: {error.cmd[2]} ended with exit status {error.returncode}", file=sys.stderr)
        return 1
    metrics = tau_metrics(measured) | training_metrics(curve)
    provenance = json.loads((args.run / "best" / "provenance.json").read_text(encoding="utf-8"))
    settings = {"warm_up_steps": WARM_UP_STEPS, "provenance": provenance}
    result = make_result(args.name, runs=[*curve, measured], metrics=metrics, settings=settings)
    for name, value in metrics.items():
        print(f"{name:24} {value}")
    print(f"wrote {write_result(result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
