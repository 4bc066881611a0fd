"""Acceptance of several sets as tables for people: one line a set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from train.acceptance import Acceptance, mean_over_sets

ABSENT = "-"


def tables(found: Mapping[str, Acceptance]) -> list[Table]:
    """The figures, acceptance by position, and accept lengths; by the name of the set, at least one."""
    first = next(iter(found.values()))
    block_size = len(first.sync.accept_histogram)
    return [
        _figures(found),
        _percentages(
            "Candidates that stood where all earlier ones did, by position, %",
            range(1, block_size),
            {name: acceptance.sync.position_acceptance for name, acceptance in found.items()},
        ),
        _percentages(
            "Rounds by candidates accepted, %",
            range(block_size),
            {name: _shares(acceptance.sync.accept_histogram) for name, acceptance in found.items()},
        ),
    ]


def _figures(found: Mapping[str, Acceptance]) -> Table:
    first = next(iter(found.values()))
    branches = f"C {first.coverage}, F {first.fanout}"
    table = Table(title=f"Greedy acceptance; drafting ahead with {branches}")
    table.add_column("set")
    for heading in ("answers", "tokens", "rounds", "tau", "tau ahead", "hit rate"):
        table.add_column(heading, justify="right")
    for name, acceptance in found.items():
        sync = acceptance.sync
        counts = [str(count) for count in (sync.num_answers, sync.num_tokens, sync.num_rounds)]
        table.add_row(name, *counts, *map(_number, _rates(acceptance)))
    columns = zip(*(_rates(acceptance) for acceptance in found.values()), strict=True)
    table.add_section()
    table.add_row("mean", "", "", "", *(_number(mean_over_sets(column)) for column in columns))
    return table


def _rates(acceptance: Acceptance) -> tuple[float | None, float | None, float | None]:
    return acceptance.tau, acceptance.ahead.tau, acceptance.hit_rate


def _percentages(title: str, columns: range, rows: Mapping[str, Sequence[float | None]]) -> Table:
    table = Table(title=title)
    table.add_column("set")
    for column in columns:
        table.add_column(str(column), justify="right")
    for name, shares in rows.items():
        table.add_row(name, *(ABSENT if share is None else f"{100 * share:.0f}" for share in shares))
    return table


def _shares(counts: Sequence[int]) -> list[float | None]:
    total = sum(counts)
    return [count / total if total else None for count in counts]


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.3f}"
