"""Are the tokens the same with D3D as without? Greedy, fp32, on the CPU, with SmolLM2-135M-Instruct.

The plain SGLang server answers prompts one at a time; every other run is compared with that. D3D drafts
synchronously and ahead, with few and many branches, redrafting after a miss or using siblings, with three
drafters: one scripted from the plain answers with seeded errors, so that every outcome occurs; an untrained
one cut from the target, nearly always wrong; and the whole target, untrained as a drafter. Answers are kept
as they come: started again, the bench asks only for what is missing. Run it with `make identity`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from bench.answers import TIE_GAP, Answer, Comparison, compare
from bench.identity_counts import Session
from bench.identity_metrics import Summary, metrics_of, shortcomings, summarise
from bench.identity_plan import REFERENCE, Run, Settings
from bench.identity_runs import Identity
from bench.prompts import DATA_ENV, data_folder
from bench.result import ROOT, Result, make_result, write_result
from serve.launch import ServerError
from serve.smollm2 import default_home

RESULT_NAME = "identity_cpu"
TABLE_WIDTH = 120  # narrower, names would be cut


class Record:
    """The record as far as runs are finished; written anew after every one.

    A record of the project is of everything; where only a part was asked for it goes to the work folder.
    """

    def __init__(self, settings: Settings, *, runs: Sequence[Run], work: Path) -> None:
        self.summaries: dict[Run, Summary] = {}
        self._settings = settings
        self._missing = list(runs)
        self._root = ROOT if settings == Settings() else work
        self._rows: list[dict[str, Any]] = []
        self._reference: dict[str, Answer] = {}

    def add(self, run: Run, answers: Sequence[Answer], sessions: Sequence[Session]) -> Path:
        """Compare a finished run with the reference, which comes first, and write the record."""
        if run == REFERENCE:
            self._reference = {answer.name: answer for answer in answers}
        comparisons = [compare(self._reference[answer.name], answer) for answer in answers]
        self.summaries[run] = summarise(run, answers, comparisons, sessions)
        self._missing.remove(run)
        self._rows.append(_run_row(self.summaries[run], sessions, answers, comparisons))
        return write_result(self.result(), self._root)

    def result(self) -> Result:
        """The record; `complete` among its metrics is 0 as long as runs are missing."""
        return make_result(
            RESULT_NAME,
            runs=self._rows,
            metrics={
                "complete": int(not self._missing),
                **metrics_of(self.summaries, block_size=self._settings.block_size),
            },
            settings={
                **asdict(self._settings),
                "tie_gap": TIE_GAP,
                "reference": str(REFERENCE),
                "threads": os.environ.get("OMP_NUM_THREADS", "all cores"),
                "runs_missing": [str(run) for run in self._missing],
            },
        )


def main() -> int:
    """Ask, write the record, print the table; 0 if no token differs without an excuse, else 1."""
    args = _parse_args()
    settings = Settings(args.sets, args.prompts, args.tokens, args.block_size, args.layers, args.only)
    console = Console()
    try:
        record, path = _ask_all(settings, data=data_folder(args.data), work=args.work, console=console)
    except (ValueError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"interrupted: the answers so far are kept in {args.work}, run it again to go on", file=sys.stderr
        )
        return 130
    Console(width=TABLE_WIDTH).print(_table(record.summaries))
    metrics = record.result().metrics
    console.print(" ".join(f"{name} {value}" for name, value in metrics.items()))
    console.print(f"written: {path}", soft_wrap=True)
    failures = []
    if metrics["mismatches"]:
        failures.append(f"{metrics['mismatches']} answers differ from the plain server's and not at a tie")
    if settings == Settings():  # a part cannot meet everything
        failures += shortcomings(metrics, block_size=settings.block_size)
    for failure in failures:
        console.print(f"FAILED: {failure}")
    return int(bool(failures))


def _ask_all(settings: Settings, *, data: Path, work: Path, console: Console) -> tuple[Record, Path]:
    """Finish all runs, with a progress bar, or with lines where nobody sees a bar move."""
    columns = (TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
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
        bar.update(task, total=sum(map(identity.num_questions, identity.runs)))
        record, path = Record(settings, runs=identity.runs, work=work), work
        started, expected = time.monotonic(), identity.expected_seconds()
        num_missing = sum(map(identity.num_missing, identity.runs))
        console.print(f"{num_missing} answers are missing: about {expected / 60:.0f} min on two cores")

        def finish(run: Run, answers: list[Answer], sessions: list[Session]) -> None:
            nonlocal path
            path = record.add(run, answers, sessions)
            left = identity.expected_seconds()
            if left < expected:
                left *= (time.monotonic() - started) / (expected - left)
            console.print(
                f"finished: {record.summaries[run]}; about {left / 60:.0f} min left", soft_wrap=True
            )

        identity.ask(finish)
    return record, path


def _run_row(
    summary: Summary,
    sessions: Sequence[Session],
    answers: Sequence[Answer],
    comparisons: Sequence[Comparison],
) -> dict[str, Any]:
    return {
        "run": str(summary.run),
        "flags": " ".join(summary.run.server.flags),
        "answers": summary.num_answers,
        "tokens": summary.num_tokens,
        "identical": summary.identical,
        "excused_ties": summary.excused,
        "mismatches": summary.mismatches,
        "tau": summary.tau,
        "accept_histogram": " ".join(map(str, summary.accept_histogram)),
        "counts": summary.counts.to_dict(),
        "sessions": [{"answers": one.num_answers, "seconds": one.seconds, **one.options} for one in sessions],
        "each": [
            _answer_row(answer, comparison) for answer, comparison in zip(answers, comparisons, strict=True)
        ],
    }


def _answer_row(answer: Answer, comparison: Comparison) -> dict[str, Any]:
    # Numbers as text: the record would have a line for each. Tokens equal to the reference's are left out.
    shown = () if comparison.identical and not answer.top_two else answer.output_ids
    return {
        "prompt": answer.name,
        "prompt_tokens": len(answer.prompt_ids),
        "output_ids": " ".join(map(str, shown)),
        "accept_histogram": " ".join(map(str, answer.accept_histogram)),
        "first_difference": comparison.position,
        "gap": comparison.gap,
    }


def _table(summaries: dict[Run, Summary]) -> Table:
    columns = ("answers", "tokens", "same", "ties", "differ", "tau", "hit", "full", "sibling", "redraft")
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
        origins = [summary.counts.origins[name] for name in ("hit", "full", "sibling", "redraft")]
        table.add_row(str(run), *map(str, counts), tau, *map(str, origins))
    return table


def _texts(value: str) -> tuple[str, ...]:
    return tuple(value.split(","))


def _numbers(value: str) -> tuple[int, ...]:
    return tuple(map(int, value.split(",")))


def _parse_args() -> argparse.Namespace:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m bench.identity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", help=f"folder of the benchmark sets (default: {DATA_ENV}, or ../shared/data/bench)")
    add("--work", type=Path, default=default_home() / "identity", help="where answers are kept")
    add("--only", type=_texts, default=(), metavar="A,B", help="runs whose names contain A or B")
    add("--sets", type=_texts, default=default.sets, metavar="A,B")
    add("--prompts", type=int, default=default.prompts_per_set, help="conversations of each set")
    add("--tokens", type=int, default=default.num_tokens, help="new tokens of an answer")
    add("--block-size", type=int, default=default.block_size)
    add("--layers", type=_numbers, default=default.layers, metavar="28,29", help="of the target, for `cut`")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
