"""`d3d init-drafter`: make a drafter folder out of an ordinary causal LM."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from d3d_sglang.drafter_config import DEFAULT_COVERAGE, DEFAULT_FANOUT, THINKING_MODES

DTYPE_NAMES = ("float32", "bfloat16", "float16")


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "init-drafter",
        help="make a drafter from a causal LM",
        description="Keep some layers of a causal LM and write them as an (untrained) D3D drafter.",
    )
    parser.add_argument("--from", dest="source", required=True, metavar="MODEL", help="model folder or id")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--block-size", required=True, type=int, metavar="B", help="tokens of a block, anchor included"
    )
    parser.add_argument("--layers", type=_layer_list, metavar="0,4,9", help="layers to keep (default: all)")
    parser.add_argument("--mask-token-id", type=int, metavar="N", help="default: a reserved id of the model")
    parser.add_argument(
        "--target", metavar="MODEL", help="refuse a drafter with another vocabulary than this"
    )
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="default: as the source is stored")
    parser.add_argument(
        "--coverage", type=int, help=f"accept lengths drafted ahead (default: {DEFAULT_COVERAGE}, at most B)"
    )
    parser.add_argument(
        "--fanout", type=int, default=DEFAULT_FANOUT, help="bonus tokens drafted ahead for each (default: 2)"
    )
    parser.add_argument(
        "--thinking", choices=THINKING_MODES, help="whether the target's answers to train on think"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier drafter at --out")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the drafter; returns the exit code."""
    import torch  # this and the next line take seconds

    from d3d_sglang.drafter.initialise import DrafterPlan, init_drafter

    start = time.monotonic()
    plan = DrafterPlan(
        source=args.source,
        out=args.out,
        block_size=args.block_size,
        layers=args.layers,
        mask_token_id=args.mask_token_id,
        target=args.target,
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
        coverage=args.coverage,
        fanout=args.fanout,
        thinking_mode=args.thinking,
        overwrite=args.overwrite,
    )
    drafter = init_drafter(plan, progress=lambda line: _say(f"[{time.monotonic() - start:5.1f} s] {line}"))
    _say(
        f"{drafter.path}: {drafter.num_layers} layers, block size {drafter.d3d_config.block_size}, "
        f"mask token {drafter.d3d_config.mask_token_id}, {drafter.dtype}. Not trained yet: it drafts badly "
        "until it is."
    )
    if args.target is None:
        _say("No --target was given: whether it fits one is checked when the server starts.")
    return 0


def _layer_list(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,4,9") from error


def _say(line: str) -> None:
    print(line, flush=True)
