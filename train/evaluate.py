"""Exact greedy tau of a drafter on the target's greedy answers, without running the target.

    python -m train.evaluate --drafter DIR --answers dev.jsonl.gz [--answers gsm8k.jsonl ...] \\
        [--coverage 12 --fanout 2] [--max-prompts N] [--device cuda] [--out result.json]

The answers are rows of `train.regenerate --greedy`. Tau is that of a server in sync mode on the same prompts:
pooled within a file, then the plain mean over files. The hit rate is that of drafting ahead with the given
coverage and fanout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from d3d_sglang.drafter.checkpoint import DrafterCheckpoint, check_pair, read_drafter
from train.acceptance import Acceptance, mean_over_sets
from train.acceptance_table import tables
from train.answer_drafts import draft_answers
from train.attention import ATTENTION_NAMES
from train.chat_format import ChatFormat, read_chat_format
from train.dataset import Example
from train.dataset_build import MAX_DROPPED_SHARE, Source, build_dataset
from train.model import TrainModel, load_lm
from train.row_file import write_whole
from train.token_account import TokenAccount
from train.tokenise import Limits

DEFAULT_BATCH_TOKENS = 32_768
DTYPE_NAMES = ("float32", "bfloat16", "float16")
EXIT_USER_ERROR = 2


def evaluate_examples(
    model: TrainModel,
    examples: Sequence[Example],
    *,
    block_size: int,
    coverage: int,
    fanout: int,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    on_answer: Callable[[], None] = lambda: None,
) -> Acceptance:
    """Acceptance pooled over examples whose responses are the target's greedy answers.

    Args:
        batch_tokens: columns of a pass at most: bounds the memory.
        on_answer: called after each example.

    Raises:
        ValueError: no examples, one that does not fit, or a branch set that is not possible.
    """
    if not examples:
        raise ValueError("examples is empty: there is nothing to measure acceptance on")
    pooled = Acceptance.none(block_size=block_size, coverage=coverage, fanout=fanout)
    was_training = model.training
    model.eval()
    try:
        for _, drafts in draft_answers(
            model, examples, block_size=block_size, top=fanout + 1, batch_tokens=batch_tokens
        ):
            pooled += Acceptance.of(drafts, coverage=coverage, fanout=fanout)
            on_answer()
    finally:
        model.train(was_training)
    return pooled


@dataclass(frozen=True)
class AnswerSet:
    """The answers of one file that are measured; `account` is of the whole file."""

    name: str
    examples: list[Example]
    account: TokenAccount


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = _parser().parse_args(arguments)
    console = Console(stderr=True)
    try:
        found = _evaluate(args, console)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    for table in tables({name: acceptance for name, (acceptance, _) in found.items()}):
        Console(width=max(120, console.width)).print(table)
    return 0


def _evaluate(args: argparse.Namespace, console: Console) -> dict[str, tuple[Acceptance, TokenAccount]]:
    drafter = read_drafter(args.drafter)
    if args.target is not None:
        for warning in check_pair(drafter, args.target):
            console.print(f"warning: {warning}", markup=False)
    chat_format = read_chat_format(
        args.target or args.drafter, thinking=drafter.d3d_config.thinking_mode == "on"
    )
    sets = [_read_set(path, drafter, chat_format, args=args, console=console) for path in args.answers]
    names = [one.name for one in sets]
    if len(set(names)) != len(names):
        raise ValueError(f"--answers names the sets {names}, they must differ: rename a file")
    block_size = drafter.d3d_config.block_size
    coverage = drafter.d3d_config.coverage if args.coverage is None else args.coverage
    fanout = drafter.d3d_config.fanout if args.fanout is None else args.fanout
    model = _load(drafter, args)
    found = {}
    with _progress(console) as progress:
        for one in sets:
            task = progress.add_task(one.name, total=len(one.examples))
            acceptance = evaluate_examples(
                model,
                one.examples,
                block_size=block_size,
                coverage=coverage,
                fanout=fanout,
                batch_tokens=args.batch_tokens,
                on_answer=lambda task=task: progress.advance(task),
            )
            found[one.name] = (acceptance, one.account)
    if args.out is not None:
        settings = {
            "drafter": str(args.drafter),
            "block_size": block_size,
            "max_prompts": args.max_prompts,
            "dtype": str(model.lm.dtype).removeprefix("torch."),
            "device": args.device,
            "attention": args.attention,
        }
        content = report(found) | {"settings": settings}
        write_whole(args.out, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")
    return found


def report(found: dict[str, tuple[Acceptance, TokenAccount]]) -> dict[str, Any]:
    """JSON form of the sets and of their plain means."""
    acceptances = [acceptance for acceptance, _ in found.values()]
    return {
        "tau_mean": mean_over_sets([acceptance.tau for acceptance in acceptances]),
        "tau_async_mean": mean_over_sets([acceptance.ahead.tau for acceptance in acceptances]),
        "hit_rate_mean": mean_over_sets([acceptance.hit_rate for acceptance in acceptances]),
        "sets": {
            name: acceptance.to_dict() | {"answers": account.to_dict()}
            for name, (acceptance, account) in found.items()
        },
    }


def _read_set(
    path: Path,
    drafter: DrafterCheckpoint,
    chat_format: ChatFormat,
    *,
    args: argparse.Namespace,
    console: Console,
) -> AnswerSet:
    limits = Limits(
        # The server drafts as long as a whole block fits.
        max_length=drafter.max_position_embeddings - drafter.d3d_config.block_size,
        mask_token_id=drafter.d3d_config.mask_token_id,
    )
    source = Source(files=(path,), limits=limits, max_dropped_share=args.max_dropped_share)
    dataset = build_dataset(source, chat_format, console=console)
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    console.print(f"{name}: {dataset.account}", markup=False, highlight=False, soft_wrap=True)
    count = len(dataset) if args.max_prompts is None else min(args.max_prompts, len(dataset))
    # Spread evenly: files are sorted by topic here and there.
    chosen = [dataset[i * len(dataset) // count] for i in range(count)]
    return AnswerSet(name=name, examples=chosen, account=dataset.account)


def _load(drafter: DrafterCheckpoint, args: argparse.Namespace) -> TrainModel:
    dtype = drafter.dtype if args.dtype is None else getattr(torch, args.dtype)
    lm = load_lm(drafter.path, dtype=dtype, attention=args.attention).requires_grad_(False)
    model = TrainModel(lm, mask_token_id=drafter.d3d_config.mask_token_id, attention=args.attention)
    return model.to(args.device)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train.evaluate",
        description="Greedy tau and hit rate of a drafter on a target's greedy answers.",
    )
    parser.add_argument("--drafter", required=True, type=Path, metavar="DIR")
    parser.add_argument(
        "--answers",
        required=True,
        type=Path,
        action="append",
        metavar="FILE",
        help=".jsonl or .jsonl.gz of greedy answers; each file is a set of its own; may be repeated",
    )
    parser.add_argument(
        "--target", metavar="DIR", help="check the pair, and take the chat template and end tokens from here"
    )
    parser.add_argument("--coverage", type=int, help="accept lengths drafted ahead (default: the drafter's)")
    parser.add_argument("--fanout", type=int, help="tokens drafted ahead for each (default: the drafter's)")
    parser.add_argument("--max-prompts", type=_positive, metavar="N", help="of each set, spread evenly")
    parser.add_argument(
        "--batch-tokens", type=_positive, default=DEFAULT_BATCH_TOKENS, help="tokens of a pass at most"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="default: as the drafter is stored")
    parser.add_argument("--attention", choices=ATTENTION_NAMES, default="sdpa")
    parser.add_argument(
        "--max-dropped-share",
        type=float,
        default=MAX_DROPPED_SHARE,
        help=f"of answers that may be unusable (default: {MAX_DROPPED_SHARE})",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON to write")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: it must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
