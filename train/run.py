"""Train a drafter from a config file, on any number of ranks.

    deepspeed --num_gpus 2 --module train.run --config train/recipes/qwen3-8b.yaml
    torchrun --nproc_per_node 2 -m train.run --config train/recipes/qwen3-8b.yaml
    python -m train.run --config train/recipes/smoke.yaml --set optimizer.lr=3e-4

The same command goes on from the latest checkpoint in the config's `out`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import warnings
from collections.abc import Callable

from train.config import deepspeed_config, dump_config, load_config
from train.distributed import leave, read_world
from train.errors import TrainingError


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = _parser().parse_args(arguments)
    try:
        world = read_world(local_rank=args.local_rank)
        config = load_config(args.config, overrides=args.overrides)
        settings = deepspeed_config(config, world_size=world.size)
        if args.print_config:
            print(f"{dump_config(config)}\n# DeepSpeed\n{json.dumps(settings, indent=2)}")
            return 0
        from train.assembly import prepare, train  # takes seconds, which the lines above need not wait for

        say = _say if world.is_first else _say_nothing
        prepared = prepare(config, world=world, say=say)
    except ValueError as error:
        return _refuse(error)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    try:
        train(config, prepared, world=world, say=say, asked_to_stop=_listen_for_signals())
    except TrainingError as error:
        return _refuse(error)
    leave()
    return 0


def _listen_for_signals() -> Callable[[], bool]:
    """From now on the first SIGINT or SIGTERM asks for a clean end; a second SIGINT interrupts at once."""
    received: list[int] = []

    def handle(number: int, _frame: object) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return lambda: bool(received)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train.run", description="Train a D3D drafter.")
    parser.add_argument("--config", required=True, metavar="FILE", help="a YAML file, see train/recipes")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="A.B=VALUE",
        help="replace one field of the config; may be given several times",
    )
    parser.add_argument("--print-config", action="store_true", help="show all settings and exit")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="set by the DeepSpeed launcher")
    return parser


def _refuse(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return 1


def _say(line: str) -> None:
    print(line, flush=True)


def _say_nothing(_line: str) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
