"""Development sets: disjoint, the same wherever they are drawn, and never trained on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.split import COMMITTED, NAMES, SIZE, draw, main, read_ids


def write_prompts(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"id": f"p{i}", "source": "s", "prompt": f"say {i} é"} for i in range(count)]


def part(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def options(prompts: Path, *more: str | Path) -> list[str]:
    return ["--prompts", str(prompts), *map(str, more)]


@given(st.sets(st.text(max_size=5), min_size=9, max_size=40), st.integers(0, 99), st.randoms())
def test_draw(ids: set[str], seed: int, random: Any) -> None:
    sets = draw(ids, size=4, seed=seed)
    assert [len(set(one)) for one in sets.values()] == [4, 4]
    assert not set(sets["dev1"]) & set(sets["dev2"])
    assert set(sets["dev1"]) | set(sets["dev2"]) < ids
    shuffled = list(ids)
    random.shuffle(shuffled)
    assert draw(shuffled, size=4, seed=seed) == sets


def test_draws_are_random() -> None:
    """Every id is drawn about equally often: 400 draws of 10 of 50 give each 80 times, deviation 8."""
    ids = [f"p{i:02}" for i in range(50)]
    drawn = Counter(one for seed in range(400) for one in draw(ids, size=5, seed=seed)["dev1"])
    drawn += Counter(one for seed in range(400) for one in draw(ids, size=5, seed=seed)["dev2"])
    assert len(drawn) == 50
    assert 80 - 5 * 8 < min(drawn.values()) <= max(drawn.values()) < 80 + 5 * 8


def test_committed_ids() -> None:
    sets = read_ids(COMMITTED)
    assert [len(set(sets[name])) for name in NAMES] == [SIZE, SIZE]
    assert not set(sets["dev1"]) & set(sets["dev2"])


def test_draw_then_apply(tmp_path: Path) -> None:
    rows = numbered(60)
    prompts = write_prompts(tmp_path / "prompts.jsonl", rows)
    assert main(options(prompts, "--ids", tmp_path / "ids", "--draw", "--size", "7", "--seed", "3")) == 0
    assert main(options(prompts, "--ids", tmp_path / "ids", "--out", tmp_path / "out")) == 0
    parts = {name: part(tmp_path / "out", name) for name in ("train", "dev1", "dev2")}
    assert {name: len(one) for name, one in parts.items()} == {"train": 46, "dev1": 7, "dev2": 7}
    assert sorted((row for one in parts.values() for row in one), key=rows.index) == rows
    assert parts["train"] == sorted(parts["train"], key=rows.index), "the order of the file was lost"
    for name in NAMES:
        assert [row["id"] for row in parts[name]] == sorted(
            read_ids(tmp_path / "ids")[name], key=lambda one: int(one[1:])
        )
        lines = (tmp_path / "out" / f"{name}.jsonl").read_bytes().splitlines(keepends=True)
        assert set(lines) <= set(prompts.read_bytes().splitlines(keepends=True)), "rows were rewritten"


def test_an_earlier_draw_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", numbered(60))
    drawing = options(prompts, "--ids", tmp_path, "--draw", "--size", "5")
    assert main(drawing) == 0
    before = (tmp_path / "dev1.txt").read_text()
    assert main([*drawing, "--seed", "1"]) == 2
    assert "exists" in capsys.readouterr().err
    assert (tmp_path / "dev1.txt").read_text() == before


@pytest.mark.parametrize(
    ("dev1", "dev2", "message"),
    [
        ("p1\np2\n", "p3\np1\n", "'p1' is in dev1 and in dev2"),
        ("p1\np1\n", "p3\n", "'p1' is in dev1 and in dev1"),
        ("p1\npx\n", "py\n", "2 ids of the development sets are not among the prompts: px, py"),
        ("p1\n", "", "holds no ids"),
        ("p1\n", None, "draw the sets with --draw"),
        ("p0\np1\np2\n", "p3\np4\n", "no prompts are left"),
    ],
)
def test_ids_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dev1: str, dev2: str | None, message: str
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", numbered(5))
    (tmp_path / "dev1.txt").write_text(dev1)
    if dev2 is not None:
        (tmp_path / "dev2.txt").write_text(dev2)
    assert main(options(prompts, "--ids", tmp_path, "--out", tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("other", ["p2", "p4"])
def test_the_same_text_in_two_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str) -> None:
    rows = numbered(6)
    for row in rows:
        if row["id"] in ("p1", other):
            row["prompt"] = "the same"
    prompts = write_prompts(tmp_path / "prompts.jsonl", rows)
    (tmp_path / "dev1.txt").write_text("p1\n")
    (tmp_path / "dev2.txt").write_text("p2\n")
    assert main(options(prompts, "--ids", tmp_path, "--out", tmp_path / "out")) == 2
    place = "dev2" if other == "p2" else "train"
    assert f"{other} of {place} = p1 of dev1" in capsys.readouterr().err


def test_repetitions_within_one_set_are_no_overlap(tmp_path: Path) -> None:
    rows = [row | {"prompt": "the same"} if row["id"] in ("p3", "p4") else row for row in numbered(6)]
    prompts = write_prompts(tmp_path / "prompts.jsonl", rows)
    (tmp_path / "dev1.txt").write_text("p1\n")
    (tmp_path / "dev2.txt").write_text("p2\n")
    assert main(options(prompts, "--ids", tmp_path, "--out", tmp_path / "out")) == 0


def test_malformed_rows_are_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", [*numbered(20), {"id": "bad"}])
    more = (
        "--ids",
        tmp_path,
        "--draw",
        "--size",
        "2",
        "--out",
        tmp_path / "out",
        "--max-refused-share",
        "0.1",
    )
    assert main(options(prompts, *more)) == 0
    assert "warning: 1 malformed rows left out" in capsys.readouterr().out
    assert len(part(tmp_path / "out", "train")) == 16


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--draw", "--size", "3"), "6 prompts are to be set aside, there are only 6"),
        (("--draw", "--size", "0"), "size is 0"),
        ((), "--out is missing"),
    ],
)
def test_wrong_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", numbered(6))
    assert main(options(prompts, "--ids", tmp_path / "ids", *more)) == 2
    assert f"error: {message}" in capsys.readouterr().err
