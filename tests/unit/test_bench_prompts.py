"""Reading benchmark sets: both file forms, even spread, and messages that name what is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench.prompts import DATA_ENV, Conversation, data_folder, read_set

ROWS = [{"id": f"row-{i}", "prompt": f"say {i}\u2028and stop"} for i in range(10)]


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


@pytest.mark.parametrize("file_name", ["demo.jsonl", "demo.jsonl.gz"])
def test_reads_both_forms(tmp_path: Path, file_name: str) -> None:
    write_rows(tmp_path / file_name, ROWS)
    assert read_set(tmp_path, "demo") == [Conversation(row["id"], (row["prompt"],)) for row in ROWS]


def test_some_are_spread_over_the_file(tmp_path: Path) -> None:
    write_rows(tmp_path / "demo.jsonl", ROWS)
    assert [one.name for one in read_set(tmp_path, "demo", count=4)] == ["row-0", "row-2", "row-5", "row-7"]


def test_turns(tmp_path: Path) -> None:
    write_rows(tmp_path / "demo.jsonl", [{"id": "a", "turns": ["first", "second"]}])
    assert read_set(tmp_path, "demo") == [Conversation("a", ("first", "second"))]


@pytest.mark.parametrize("count", [0, 11])
def test_count_outside_the_set(tmp_path: Path, count: int) -> None:
    write_rows(tmp_path / "demo.jsonl", ROWS)
    with pytest.raises(ValueError, match="allowed are 1 to 10"):
        read_set(tmp_path, "demo", count=count)


def test_missing_set(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither demo\.jsonl nor demo\.jsonl\.gz"):
        read_set(tmp_path, "demo")


def test_row_of_another_form(tmp_path: Path) -> None:
    write_rows(tmp_path / "demo.jsonl", [*ROWS, {"id": "bad", "text": "?"}])
    with pytest.raises(ValueError, match="demo, row 10"):
        read_set(tmp_path, "demo")


def test_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_ENV, str(tmp_path))
    assert data_folder(None) == tmp_path
    with pytest.raises(ValueError, match=DATA_ENV):
        data_folder(str(tmp_path / "absent"))
