"""Runs of a regeneration in a test: prompts on disk, a run in this process, the account from the files."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.unit.train.chat_server import MODEL, ChatServer
from train.asking import Patience
from train.endpoints import Endpoint, Question
from train.regeneration import Plan, Regeneration
from train.sampling import GREEDY

QUICK = Patience(failures=3, attempts=3, pause_s=0.01, max_pause_s=0.02)
TIMEOUT_S = 20.0


def write_prompts(folder: Path, *rows: dict[str, Any] | str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"id": f"p{i}", "prompt": f"say {i}"} for i in range(count)]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def plan(folder: Path, **changes: Any) -> Plan:
    question = Question(MODEL, GREEDY, max_tokens=16)
    return Plan(
        **{"prompts": folder / "prompts.jsonl", "out": folder / "out.jsonl", "question": question} | changes
    )


def run(
    given: Plan, *servers: ChatServer, at_once: int = 4, patience: Patience = QUICK
) -> tuple[Regeneration, list[str]]:
    """One run in this process; returns it with its warnings."""
    warnings: list[str] = []
    regeneration = Regeneration(given)

    async def ask() -> None:
        endpoints = [Endpoint(one.url, connections=at_once, timeout_s=TIMEOUT_S) for one in servers]
        try:
            await regeneration.run(endpoints, at_once=at_once, patience=patience, warn=warnings.append)
        finally:
            for endpoint in endpoints:
                await endpoint.close()

    asyncio.run(ask())
    return regeneration, warnings


def arguments(folder: Path, *urls: str, extra: Sequence[str] = ("--greedy",)) -> list[str]:
    endpoints = [part for url in urls for part in ("--endpoint", url)]
    files = ["--prompts", str(folder / "prompts.jsonl"), "--out", str(folder / "out.jsonl")]
    return [*files, "--model", MODEL, "--max-tokens", "16", "--max-failures", "1", *endpoints, *extra]


def check_account(folder: Path, *, prompts: int, success: int, error: int = 0, skipped: int = 0) -> None:
    """The identity, counted from the files alone."""
    counts = [len(read(folder / f"out{end}.jsonl")) for end in ("", "_error", "_skipped")]
    assert counts == [success, error, skipped]
    assert sum(counts) == prompts
    ids = Counter(row["id"] for row in read(folder / "out.jsonl") + read(folder / "out_error.jsonl"))
    assert set(ids.values()) <= {1}, "a prompt was counted twice"
