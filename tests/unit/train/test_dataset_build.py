"""The cache of tokenised data sets: made once, by one of many, whole or not at all, never the wrong one."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.unit.train.chat_folder import IM_END, MASK, PLAIN_TEMPLATE, ids_of, prompt_of, write_target
from train.chat_format import ChatFormat, read_chat_format
from train.dataset import Dataset
from train.dataset_build import Source, build_dataset
from train.tokenise import Limits, Tokeniser

LONG = Limits(max_length=200, mask_token_id=MASK)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return read_chat_format(write_target(tmp_path_factory.mktemp("target")))


def write_rows(path: Path, answers: list[str]) -> Path:
    rows = [
        {
            "id": f"{path.stem}-{i}",
            "conversations": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": one}],
        }
        for i, one in enumerate(answers)
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def source(folder: Path, answers: list[str], **settings: Any) -> Source:
    return Source((write_rows(folder / "rows.jsonl", answers),), LONG, cache=folder / "cache", **settings)


def contents(dataset: Dataset) -> list[tuple[str, list[int], list[int]]]:
    examples = [dataset[i] for i in range(len(dataset))]
    return [(one.id, one.prompt_ids.tolist(), one.response_ids.tolist()) for one in examples]


def no_tokenising(*_args: Any) -> None:
    raise AssertionError("it was tokenised again")


def test_second_time_from_the_cache(
    tmp_path: Path, target: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = source(tmp_path, ["one", "two", "three"])
    first = build_dataset(asked, target)
    monkeypatch.setattr(Tokeniser, "examples", no_tokenising)
    second = build_dataset(asked, target)
    assert contents(first) == contents(second) and len(first) == 3
    assert (first.account, first.fingerprint) == (second.account, second.fingerprint)
    with pytest.raises(AssertionError, match="tokenised again"):
        build_dataset(source(tmp_path, ["one", "two", "other"]), target)


def test_with_and_without_a_cache(tmp_path: Path, target: ChatFormat) -> None:
    asked = source(tmp_path, [f"answer {i}" for i in range(1200)])  # more than one chunk
    cached, in_memory = build_dataset(asked, target), build_dataset(replace(asked, cache=None), target)
    assert contents(cached) == contents(in_memory)
    assert contents(cached)[1100] == (
        "rows-1100",
        prompt_of("say 1100"),
        [*ids_of("answer 1100"), IM_END],
    )
    assert cached.fingerprint == in_memory.fingerprint
    with pytest.raises(IndexError, match="example 1200 of 1200"):
        cached[1200]


def test_examples_are_copies(tmp_path: Path, target: ChatFormat) -> None:
    dataset = build_dataset(source(tmp_path, ["one"]), target)
    before = contents(dataset)
    dataset[0].prompt_ids[:] = 0
    assert contents(dataset) == before


def test_fingerprint_changes_with_what_changes_the_examples(tmp_path: Path, target: ChatFormat) -> None:
    asked = source(tmp_path, ["one", "two"])
    other = read_chat_format(write_target(tmp_path / "other", template=PLAIN_TEMPLATE))
    prints = [
        build_dataset(asked, target).fingerprint,
        build_dataset(asked, other).fingerprint,
        build_dataset(replace(asked, limits=Limits(100, MASK)), target).fingerprint,
        build_dataset(replace(asked, limits=Limits(200, 255)), target).fingerprint,
        build_dataset(source(tmp_path, ["one", "twa"]), target).fingerprint,
    ]
    assert len(set(prints)) == len(prints)


def test_compressing_or_moving_a_file_changes_nothing(tmp_path: Path, target: ChatFormat) -> None:
    (tmp_path / "b").mkdir()
    plain = write_rows(tmp_path / "rows.jsonl", ["one"])
    packed = tmp_path / "b" / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    prints = {build_dataset(Source((path,), LONG), target).fingerprint for path in (plain, packed)}
    assert len(prints) == 1


def test_several_files(tmp_path: Path, target: ChatFormat) -> None:
    files = (write_rows(tmp_path / "a.jsonl", ["one"]), write_rows(tmp_path / "b.jsonl.gz", ["two", "three"]))
    dataset = build_dataset(Source(files, LONG), target)
    assert [name for name, *_ in contents(dataset)] == ["a-0", "b.jsonl-0", "b.jsonl-1"]


def test_a_cached_set_is_held_against_the_share_again(tmp_path: Path, target: ChatFormat) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ["one", " "])
    lenient = Source((path,), LONG, max_dropped_share=0.5, cache=tmp_path / "cache")
    assert len(build_dataset(lenient, target)) == 1
    with pytest.raises(ValueError, match="unusable"):
        build_dataset(replace(lenient, max_dropped_share=0.4), target)


def test_many_at_once_tokenise_once(
    tmp_path: Path, target: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the ranks of a host do; locks of threads on one file exclude each other as those of processes do."""
    asked, made = source(tmp_path, ["one", "two"]), []
    examples = Tokeniser.examples

    def counted(self: Tokeniser, rows: Any) -> Any:
        made.append(self)
        return examples(self, rows)

    monkeypatch.setattr(Tokeniser, "examples", counted)
    with ThreadPoolExecutor(8) as pool:
        datasets = list(pool.map(lambda _: build_dataset(asked, target), range(8)))
    assert len(made) == 1
    assert all(contents(one) == contents(datasets[0]) for one in datasets)


def test_full_disk_leaves_nothing_and_a_second_try_works(
    tmp_path: Path, target: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = source(tmp_path, ["one", "two"])

    def full(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(np, "savez", full)
        with pytest.raises(OSError, match="No space left"):
            build_dataset(asked, target)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    assert len(build_dataset(asked, target)) == 2


def test_progress_is_shown(tmp_path: Path, target: ChatFormat) -> None:
    with (tmp_path / "said").open("w+") as file:
        console = Console(file=file, force_terminal=True, width=80)
        build_dataset(source(tmp_path, ["one", "two"]), target, console=console)
        file.seek(0)
        said = file.read()
    assert "tokenising" in said and "100%" in said
