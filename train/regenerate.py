"""Prompts in, the target's answers out: what a drafter is trained on, and what it is measured against.

    python -m train.regenerate --prompts prompts.jsonl.gz --out answers.jsonl --model NAME \\
        --endpoint http://127.0.0.1:30000 [--endpoint ...] (--greedy | --model-path DIR | --temperature T)

Writes answers.jsonl, and beside it answers_error.jsonl and answers_skipped.jsonl: together they account for
every prompt. Stop it at any time: the same command goes on where it stopped, and asks those in the error file
again. Answers cut at --max-tokens are kept, marked with finish_reason "length"; they have no end token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from train.asking import EndpointsLostError, Patience
from train.conversations import MAX_REFUSED_SHARE
from train.endpoints import Endpoint, EndpointFailureError, PromptRefusedError, Question
from train.regeneration import Plan, Regeneration
from train.sampling import choose_sampling

DEFAULT_AT_ONCE = 64
DEFAULT_TIMEOUT_S = 600.0
DEFAULT_MAX_TOKENS = 4096
LINE_SECONDS = 30.0  # between lines where nobody sees a bar move
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class Display:
    """The progress bar, or a line now and then where nobody sees a bar move."""

    def __init__(self, regeneration: Regeneration, console: Console) -> None:
        self._regeneration = regeneration
        self._console = console
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self.bar = Progress(
            TextColumn("answers"),
            *columns,
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        account = regeneration.account
        self._task = self.bar.add_task(
            "", total=account.prompts, completed=account.prompts - account.open, note=""
        )
        self._began = self._printed = time.monotonic()
        self._tokens_before = account.tokens

    def change(self) -> None:
        """Show the account as it is now."""
        account, now = self._regeneration.account, time.monotonic()
        speed = (account.tokens - self._tokens_before) / max(1e-9, now - self._began)
        note = f"{speed:.0f} tokens/s, {account.error} errors"
        self.bar.update(self._task, completed=account.prompts - account.open, note=note)
        if not self._console.is_terminal and now - self._printed >= LINE_SECONDS:
            self._printed = now
            self._console.print(f"{account.success} of {account.prompts} answered, {note}", soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print above the bar."""
        self._console.print(f"warning: {text}", soft_wrap=True, markup=False)


async def usable_endpoints(
    endpoints: Sequence[Endpoint], model: str, *, warn: Callable[[str], None]
) -> list[Endpoint]:
    """Those that answer now; the others are warned about.

    Raises:
        EndpointsLostError: there is none.
        ValueError: one does not serve `model`.
    """
    usable = []
    for endpoint in endpoints:
        try:
            served = await endpoint.models()
        except (EndpointFailureError, PromptRefusedError) as error:
            warn(f"{endpoint.url}: left out, {error}")
            continue
        if model not in served:
            raise ValueError(f"model {model!r} is not served by {endpoint.url}, it has {', '.join(served)}")
        usable.append(endpoint)
    if not usable:
        raise EndpointsLostError("no endpoint answers")
    return usable


async def regenerate(regeneration: Regeneration, args: argparse.Namespace, console: Console) -> None:
    """Ask what is still to ask.

    Raises:
        EndpointsLostError, ValueError, OSError: as `Regeneration.run` and `usable_endpoints`.
    """
    endpoints = [
        Endpoint(
            url,
            connections=args.concurrency,
            timeout_s=args.timeout,
            api_key=os.environ[args.api_key_env] if args.api_key_env else None,
        )
        for url in args.endpoint
    ]
    patience = Patience(failures=args.max_failures)
    display = Display(regeneration, console)
    try:
        usable = await usable_endpoints(endpoints, args.model, warn=display.warn)
        with display.bar:
            await regeneration.run(
                usable,
                at_once=args.concurrency,
                patience=patience,
                warn=display.warn,
                on_change=display.change,
            )
    finally:
        for endpoint in endpoints:
            await endpoint.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 if every prompt is accounted for."""
    args = _parser().parse_args(argv)
    console = Console()
    regeneration: Regeneration | None = None
    try:
        regeneration = Regeneration(_plan(args))
        account = regeneration.account
        console.print(
            f"{account.prompts} prompts, {regeneration.num_before} answered before, "
            f"{account.skipped} skipped, {len(regeneration.to_ask)} to ask",
            soft_wrap=True,
        )
        if regeneration.to_ask:
            asyncio.run(regenerate(regeneration, args, console))
    except (EndpointsLostError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    else:
        code = 0
    if regeneration is not None:
        print(regeneration.account)
        if code and regeneration.account.success:
            print(f"the answers are kept in {args.out}: the same command goes on from there", file=sys.stderr)
    return code


def _plan(args: argparse.Namespace) -> Plan:
    if args.api_key_env and args.api_key_env not in os.environ:
        raise ValueError(f"--api-key-env names {args.api_key_env}, which is not set")
    sampling = choose_sampling(
        greedy=args.greedy,
        model_path=args.model_path,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
    )
    return Plan(
        prompts=args.prompts,
        out=args.out,
        question=Question(args.model, sampling, max_tokens=args.max_tokens, thinking=args.thinking),
        limit=args.limit,
        spread=args.spread,
        max_refused_share=args.max_refused_share,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train.regenerate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--prompts", required=True, type=Path, metavar="FILE", help=".jsonl or .jsonl.gz")
    add("--out", required=True, type=Path, metavar="FILE", help="answers to write, or to go on with")
    add("--endpoint", required=True, action="append", metavar="URL", help="may be given several times")
    add("--model", required=True, metavar="NAME", help="as the endpoints name it")
    add("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, help="of an answer (default: %(default)s)")
    add("--greedy", action="store_true", help="temperature 0: for development sets and evaluation")
    add("--model-path", type=Path, metavar="DIR", help="sample as its generation_config.json recommends")
    add("--temperature", type=float)
    add("--top-p", type=float)
    add("--top-k", type=int)
    add("--min-p", type=float)
    add("--thinking", action="store_true", help="let the target think first (default: off)")
    add("--concurrency", type=int, default=DEFAULT_AT_ONCE, help="requests at once at each endpoint")
    add("--timeout", type=float, default=DEFAULT_TIMEOUT_S, metavar="S", help="of a request")
    add("--max-failures", type=int, default=Patience.failures, help="in a row, then an endpoint is dropped")
    add("--limit", type=int, metavar="N", help="only the first N prompts")
    add("--spread", type=int, metavar="N", help="only N prompts, spread evenly over the file")
    add("--max-refused-share", type=float, default=MAX_REFUSED_SHARE, help="of malformed rows, then stop")
    add("--api-key-env", metavar="NAME", help="environment variable that holds the endpoints' key")
    return parser


if __name__ == "__main__":
    sys.exit(main())
