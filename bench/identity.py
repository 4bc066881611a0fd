"""Are the tokens the same with D3D as without? Greedy, fp32, on the CPU, with SmolLM2-135M-Instruct.

Three servers answer the same prompts one at a time and eight at once: plain SGLang; D3D with an untrained
drafter cut from the target, which is nearly always wrong; D3D with a scripted drafter whose candidates are
the plain answers with seeded errors, so that every accept length occurs. All are compared with the plain
answers given one at a time. Answers are kept as they come: started again, the bench asks only for what is
missing. Run it with `make identity`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from bench.answers import TIE_GAP, Answer, Comparison, compare
from bench.identity_runs import MODES, PLAIN_BATCH, REFERENCE, SERVERS, Identity, Run, Settings
from bench.prompts import DATA_ENV, data_folder
from bench.result import ROOT, make_result, write_result
from serve.launch import ServerError
from serve.smollm2 import default_home

RESULT_NAME = "identity_cpu"


@dataclass(frozen=True)
class Summary:
    """What one run came to, beside the reference answers. `tau` is None on a plain server."""

    run: Run
    num_answers: int
    num_tokens: int
    identical: int
    excused: int
    mismatches: int
    accept_histogram: tuple[int, ...]

    @property
    def tau(self) -> float | None:
        """Tokens a round adds to a request, the bonus included."""
        rounds = sum(self.accept_histogram)
        accepted = sum(length * count for length, count in enumerate(self.accept_histogram))
        return 1 + accepted / rounds if rounds else None


def summarise(run: Run, answers: Sequence[Answer], comparisons: Sequence[Comparison]) -> Summary:
    """Count one run's answers and how they compare."""
    histograms = (answer.accept_histogram for answer in answers)
    identical = sum(comparison.identical for comparison in comparisons)
    excused = sum(comparison.excused for comparison in comparisons)
    return Summary(
        run=run,
        num_answers=len(answers),
        num_tokens=sum(len(answer.output_ids) for answer in answers),
        identical=identical,
        excused=excused,
        mismatches=len(comparisons) - identical - excused,
        accept_histogram=tuple(sum(counts) for counts in zip_longest(*histograms, fillvalue=0)),
    )


def metrics_of(summaries: Mapping[Run, Summary]) -> dict[str, float | int]:
    """The record's metrics; tokens, ties and mismatches are those of the D3D servers."""
    d3d = [summary for run, summary in summaries.items() if run.server != "plain"]
    scripted = [summary for run, summary in summaries.items() if run.server == "scripted"]
    seen = {length for summary in scripted for length, count in enumerate(summary.accept_histogram) if count}
    metrics: dict[str, float | int] = {
        "prompts": summaries[REFERENCE].num_answers,
        "tokens": sum(summary.num_tokens for summary in d3d),
        "mismatches": sum(summary.mismatches for summary in d3d),
        "excused_ties": sum(summary.excused for summary in d3d),
        "plain_batch_differences": summaries[PLAIN_BATCH].excused + summaries[PLAIN_BATCH].mismatches,
        "accept_lengths_seen": len(seen),
    }
    for summary in d3d:
        if summary.tau is not None:
            metrics[f"tau_{summary.run.server}_{summary.run.mode}"] = round(summary.tau, 4)
    return metrics


def _ask_all(settings: Settings, *, data: Path, work: Path, console: Console) -> dict[Run, list[Answer]]:
    """The answers of all runs, with a progress bar, or with lines where nobody sees a bar move."""
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def show(line: str) -> None:
            bar.update(task, description=line.strip())
            if not console.is_terminal:
                console.print(line.strip(), soft_wrap=True)

        def count(run: Run) -> None:
            bar.advance(task)
            show(f"{run}: {bar.tasks[task].completed:.0f} of {bar.tasks[task].total:.0f} answers")

        identity = Identity(settings, data=data, work=work, on_answer=count, progress=show)
        bar.update(task, total=identity.num_questions * len(MODES) * len(SERVERS))
        return identity.answers()


def main() -> int:
    """Ask, write the record, print the table; 0 if no token differs without an excuse, else 1."""
    args = _parse_args()
    settings = Settings(args.sets, args.prompts, args.tokens, args.block_size, args.layers)
    console = Console()
    try:
        answers = _ask_all(settings, data=data_folder(args.data), work=args.work, console=console)
    except (ValueError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"interrupted: the answers so far are kept in {args.work}, run it again to go on", file=sys.stderr
        )
        return 130
    comparisons = {
        run: [compare(plain, other) for plain, other in zip(answers[REFERENCE], given, strict=True)]
        for run, given in answers.items()
    }
    summaries = {run: summarise(run, given, comparisons[run]) for run, given in answers.items()}
    result = make_result(
        RESULT_NAME,
        runs=[
            _row(run, answer, comparison)
            for run, given in answers.items()
            for answer, comparison in zip(given, comparisons[run], strict=True)
        ],
        metrics=metrics_of(summaries),
        settings=asdict(settings) | {"tie_gap": TIE_GAP, "reference": str(REFERENCE)},
    )
    console.print(_table(summaries))
    # A record of the project is of all of it; a part that was asked for goes to the work folder.
    written = write_result(result, ROOT if settings == Settings() else args.work)
    console.print(f"written: {written}", soft_wrap=True)
    return _verdict(result.metrics, settings, console)


def _verdict(metrics: Mapping[str, float | int], settings: Settings, console: Console) -> int:
    failed = False
    if metrics["mismatches"]:
        failed = True
        console.print(
            f"FAILED: {metrics['mismatches']} answers differ from the plain server's and not at a tie"
        )
    if metrics["accept_lengths_seen"] < settings.block_size:
        failed = True
        console.print(
            f"FAILED: only {metrics['accept_lengths_seen']} of {settings.block_size} accept lengths occurred "
            "with the scripted drafter: ask more prompts or more tokens"
        )
    return int(failed)


def _row(run: Run, answer: Answer, comparison: Comparison) -> dict[str, Any]:
    # Numbers as text: the record would have a line for each.
    return {
        "run": str(run),
        "prompt": answer.name,
        "prompt_tokens": len(answer.prompt_ids),
        "output_ids": " ".join(map(str, answer.output_ids)),
        "accept_histogram": " ".join(map(str, answer.accept_histogram)),
        "first_difference": comparison.position,
        "gap": comparison.gap,
    }


def _table(summaries: Mapping[Run, Summary]) -> Table:
    columns = ("answers", "tokens", "same", "ties", "differ", "tau")
    table = Table(Column("run", no_wrap=True), *columns, title="greedy tokens, fp32")
    for run, summary in summaries.items():
        counts = (
            summary.num_answers,
            summary.num_tokens,
            summary.identical,
            summary.excused,
            summary.mismatches,
        )
        tau = "" if summary.tau is None else f"{summary.tau:.2f}"
        table.add_row(str(run), *map(str, counts), tau)
    return table


def _parse_args() -> argparse.Namespace:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m bench.identity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data", help=f"folder of the benchmark sets (default: {DATA_ENV}, or ../shared/data/bench)"
    )
    parser.add_argument(
        "--work", type=Path, default=default_home() / "identity", help="where answers are kept"
    )
    parser.add_argument(
        "--sets", type=lambda text: tuple(text.split(",")), default=default.sets, metavar="A,B"
    )
    parser.add_argument(
        "--prompts", type=int, default=default.prompts_per_set, help="conversations of each set"
    )
    parser.add_argument("--tokens", type=int, default=default.num_tokens, help="new tokens of an answer")
    parser.add_argument("--block-size", type=int, default=default.block_size)
    parser.add_argument(
        "--layers",
        type=lambda text: tuple(map(int, text.split(","))),
        default=default.layers,
        metavar="0,29",
        help="layers of the target the drafter is made of",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
