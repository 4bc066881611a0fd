"""Result records: complete, readable, replaced as a whole."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import d3d_sglang
from bench import result
from bench.result import make_result, write_result

RUNS = [{"batch": 1, "micros": [1.5, 2.5]}]
METRICS = {"extra_ms_b1": 0.002}


def record(name: str = "example") -> result.Result:
    return make_result(name, runs=RUNS, metrics=METRICS, settings={"block_size": 16})


def test_a_record_says_what_where_and_with_what(tmp_path: Path) -> None:
    path = write_result(record(), tmp_path)
    assert path == tmp_path / "bench" / "results" / "example.json"
    written = json.loads(path.read_text())
    assert (written["name"], written["runs"], written["metrics"]) == ("example", RUNS, METRICS)
    assert written["settings"] == {"block_size": 16}
    assert written["versions"]["d3d_sglang"] == d3d_sglang.__version__
    assert set(written["versions"]) == {"python", "d3d_sglang", "torch", "sglang", "transformers"}
    assert written["hardware"]["cpu"] and written["hardware"]["num_cores"] >= 1
    assert written["command"].startswith("python ")
    assert written["date"].endswith("+00:00")


def test_a_second_record_replaces_the_first_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_result(record(), tmp_path)
    changed = make_result("example", runs=[], metrics={"extra_ms_b1": 1.0}, settings={})
    path = write_result(changed, tmp_path)
    assert json.loads(path.read_text())["metrics"] == {"extra_ms_b1": 1.0}
    assert [file.name for file in path.parent.iterdir()] == ["example.json"]


def test_what_is_not_a_number_is_refused_and_the_old_record_stays(tmp_path: Path) -> None:
    path = write_result(record(), tmp_path)
    broken = make_result("example", runs=[], metrics={"extra_ms_b1": float("nan")}, settings={})
    with pytest.raises(ValueError):
        write_result(broken, tmp_path)
    assert json.loads(path.read_text())["metrics"] == METRICS


def test_the_commit_is_dirty_when_files_other_than_results_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def git(*args: str) -> None:
        identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
        subprocess.run(["git", *identity, *args], cwd=tmp_path, check=True, capture_output=True)

    assert result._commit(tmp_path) == result.Commit(sha=None, dirty=True)
    git("init")
    (tmp_path / "code.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "-m", "first")
    clean = result._commit(tmp_path)
    assert clean.sha is not None and len(clean.sha) == 40 and not clean.dirty
    write_result(record(), tmp_path)
    assert result._commit(tmp_path) == clean
    (tmp_path / "code.py").write_text("a = 2\n")
    assert result._commit(tmp_path) == result.Commit(sha=clean.sha, dirty=True)
