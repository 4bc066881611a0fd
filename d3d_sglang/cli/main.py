"""`d3d`: finds the subcommand and turns an expected failure into one message and exit code 2.

Each subcommand is a module with `add_parser(subparsers)`, which sets `run(args) -> int`. Heavy libraries are
imported in `run`, so that `d3d --help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from d3d_sglang import __version__
from d3d_sglang.cli import doctor, init_drafter

COMMANDS = (doctor, init_drafter)
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def make_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand."""
    parser = argparse.ArgumentParser(prog="d3d", description="D3D: block-diffusion drafting for SGLang.")
    parser.add_argument("--version", action="version", version=f"d3d-sglang {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = make_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("d3d: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ValueError, OSError) as error:
        if args.traceback:
            raise
        print(f"d3d: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
