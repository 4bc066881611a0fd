"""SmolLM2's own answers: what the training benches train on, and the greedy ones they measure tau against.

    python -m bench.smollm2_answers --prompts train_prompts.jsonl.gz --data FOLDER --out DIR [-- SERVER_ARGS]

Serves SmolLM2-135M-Instruct with plain SGLang and asks it, through `train.regenerate`, the training prompts
(sampled as the model's authors recommend), both development sets and the benchmark sets (greedy). DIR
receives train.jsonl, dev1.jsonl, dev2.jsonl and one file a benchmark set. Stopped, the same command goes on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.prompts import data_folder, read_set
from serve.launch import ServerError, ServerProcess, pick_device
from serve.smollm2 import smollm2_folder

SETS = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt_bench")
RECOMMENDED = ("--temperature", "0.2", "--top-p", "0.9")  # the model card of SmolLM2-135M-Instruct
MODEL_NAME = "target"
AT_ONCE = 512  # requests in flight; the server queues what it cannot run yet


@dataclass(frozen=True)
class Job:
    """One file of prompts to answer."""

    name: str
    prompts: Path
    flags: tuple[str, ...]


def planned_jobs(
    folder: Path, bench: Path, *, num_train: int, num_dev: int, per_set: int, tokens: int
) -> list[Job]:
    """What is asked; the short jobs first, so that an interrupted run can be measured.

    Args:
        folder: holds train.jsonl, dev1.jsonl, dev2.jsonl, prompts alone.
        tokens: longest sampled answer; greedy ones end at 256, as tau is defined.
    """
    greedy = ("--greedy", "--max-tokens", str(min(tokens, 256)))
    jobs = []
    for name in SETS:
        num_prompts = min(per_set, len(read_set(bench, name)))
        jobs.append(Job(name, _set_file(bench, name), (*greedy, "--spread", str(num_prompts))))
    jobs += [
        Job(name, folder / f"{name}.jsonl", (*greedy, "--limit", str(num_dev))) for name in ("dev1", "dev2")
    ]
    sampled = (*RECOMMENDED, "--max-tokens", str(tokens), "--limit", str(num_train))
    return [*jobs, Job("train", folder / "train.jsonl", sampled)]


def run_module(name: str, *args: str) -> None:
    """Run one of the project's commands in this environment.

    Raises:
        subprocess.CalledProcessError: it failed; it has said why.
    """
    subprocess.run([sys.executable, "-m", name, *args], check=True)


def answer_all(jobs: Sequence[Job], out: Path, *, server_args: Sequence[str]) -> None:
    """Serve the target and ask everything.

    Raises:
        ServerError, subprocess.CalledProcessError: the server or a command failed.
    """
    dtype = "bfloat16" if pick_device() == "cuda" else "float32"
    model = smollm2_folder(dtype=dtype)
    with ServerProcess(model, "--served-model-name", MODEL_NAME, *server_args) as server:
        for job in jobs:
            print(f"{job.name}:", flush=True)
            run_module(
                "train.regenerate",
                *("--prompts", str(job.prompts), "--out", str(out / f"{job.name}.jsonl")),
                *("--endpoint", server.url, "--model", MODEL_NAME, "--concurrency", str(AT_ONCE)),
                *job.flags,
            )


def _set_file(bench: Path, name: str) -> Path:
    plain = bench / f"{name}.jsonl"
    return plain if plain.is_file() else bench / f"{name}.jsonl.gz"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.smollm2_answers", description="Answers of SmolLM2 to train and measure on."
    )
    parser.add_argument("--prompts", type=Path, required=True, help="training prompts, .jsonl or .jsonl.gz")
    parser.add_argument("--data", help="folder of the benchmark sets")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-train", type=int, default=40_000, help="training prompts (default: all)")
    parser.add_argument("--num-dev", type=int, default=512, help="of each development set")
    parser.add_argument("--per-set", type=int, default=64, help="prompts of a benchmark set")
    parser.add_argument("--tokens", type=int, default=512, help="longest sampled answer")
    parser.add_argument("server_args", nargs="*", help="further arguments of the server, after --")
    args = parser.parse_args(argv)
    try:
        folder = args.out / "prompts"
        run_module("train.split", "--prompts", str(args.prompts), "--out", str(folder))
        jobs = planned_jobs(
            folder,
            data_folder(args.data),
            num_train=args.num_train,
            num_dev=args.num_dev,
            per_set=args.per_set,
            tokens=args.tokens,
        )
        answer_all(jobs, args.out, server_args=args.server_args)
    except (ServerError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"error: {error.cmd[2]} ended with exit status {error.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
