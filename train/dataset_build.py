"""Files of answers to a `Dataset`: tokenised once, kept on disk, shared by the processes of a host.

Built before any process group exists: tokenising takes minutes, and ranks that wait in a collective would
time out. The cache is keyed by the content of the files, the tokenizer with its template, and the limits.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from train.chat_format import ChatFormat
from train.conversations import read_conversations, read_lines
from train.dataset import Dataset
from train.token_account import TokenAccount
from train.tokenise import Limits, Tokeniser

FORMAT_VERSION = 1
TOKENS, INDEX, NAMES = "tokens.int32", "index.npz", "names.json"
MAX_DROPPED_SHARE = 0.05


@dataclass(frozen=True)
class Source:
    """Where examples come from.

    Attributes:
        files: of conversations, .jsonl or .jsonl.gz.
        max_dropped_share: of answers that may be unusable before it is an error.
        cache: folder of tokenised data sets; None keeps the tokens in memory only.
    """

    files: tuple[Path, ...]
    limits: Limits
    max_dropped_share: float = MAX_DROPPED_SHARE
    cache: Path | None = None

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("no files of conversations are given")
        if not 0 <= self.max_dropped_share <= 1:
            raise ValueError(f"max_dropped_share is {self.max_dropped_share}, allowed are 0 to 1")


def build_dataset(source: Source, chat_format: ChatFormat, *, console: Console | None = None) -> Dataset:
    """The data set of some files, from the cache if it is there.

    Processes that ask for the same one at the same time wait for the first to make it. `console` shows a
    progress bar.

    Raises:
        ValueError: a file cannot be read, too many answers are unusable or none is left, or as
            `Tokeniser.examples`.
        OSError: the cache cannot be written; nothing half-written stays.
    """
    console = console or Console(quiet=True)
    num_lines, fingerprint = _fingerprint(source, chat_format)
    if source.cache is None:
        with tempfile.TemporaryDirectory(prefix="d3d-dataset-") as scratch:
            _write(Path(scratch), source, chat_format, num_lines=num_lines, console=console)
            dataset = _read(Path(scratch), fingerprint, mapped=False)
    else:
        folder = source.cache / fingerprint
        with _locked(source.cache / f"{fingerprint}.lock"):
            if not folder.is_dir():
                _write_whole(folder, source, chat_format, num_lines=num_lines, console=console)
        dataset = _read(folder, fingerprint, mapped=True)
    _check(dataset, source)
    return dataset


def _check(dataset: Dataset, source: Source) -> None:
    account = dataset.account
    notes = "".join(f"\n  {note}" for note in account.notes)
    names = ", ".join(map(str, source.files))
    if account.dropped_share > source.max_dropped_share:
        raise ValueError(
            f"{names}: a share of {account.dropped_share:.3g} of the answers is unusable, allowed is "
            f"{source.max_dropped_share:g}: {account}; the first:{notes}"
        )
    if not len(dataset):
        raise ValueError(f"{names}: no answer is usable: {account}; the first:{notes}")


def _fingerprint(source: Source, chat_format: ChatFormat) -> tuple[int, str]:
    """Lines in the files, and what the examples depend on in short."""
    digest, num_lines = hashlib.sha256(), 0
    for path in source.files:
        for line in read_lines(path):
            digest.update(line.content)
            num_lines += 1
    settings = {
        "version": FORMAT_VERSION,
        "content": digest.hexdigest(),
        "chat_format": chat_format.fingerprint,
        "max_length": source.limits.max_length,
        "mask_token_id": source.limits.mask_token_id,
    }
    return num_lines, hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


def _write_whole(
    folder: Path, source: Source, chat_format: ChatFormat, *, num_lines: int, console: Console
) -> None:
    """The folder appears under its name only when it is complete."""
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(unfinished, source, chat_format, num_lines=num_lines, console=console)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(
    folder: Path, source: Source, chat_format: ChatFormat, *, num_lines: int, console: Console
) -> None:
    # Malformed rows are counted with everything else that cannot be used.
    reader = read_conversations(*source.files, max_refused_share=1.0)
    tokeniser = Tokeniser(chat_format, source.limits)
    rows = track(reader.with_lines(), "tokenising", total=num_lines, console=console)
    ids: list[str] = []
    lengths: list[tuple[int, int]] = []
    with (folder / TOKENS).open("wb") as tokens:
        for example in tokeniser.examples(rows):
            ids.append(example.id)
            lengths.append((len(example.prompt_ids), len(example.response_ids)))
            tokens.write(example.prompt_ids.tobytes())
            tokens.write(example.response_ids.tobytes())
    account = tokeniser.account
    for refusal in reader.refusals:
        account = account.plus(malformed=1, note=str(refusal))
    both = np.array(lengths, dtype=np.int64).reshape(-1, 2)
    np.savez(folder / INDEX, prompt_lengths=both[:, 0], response_lengths=both[:, 1])
    content = {"account": account.to_dict(), "ids": ids}
    (folder / NAMES).write_text(json.dumps(content), encoding="utf-8")


def _read(folder: Path, fingerprint: str, *, mapped: bool) -> Dataset:
    stored = json.loads((folder / NAMES).read_text(encoding="utf-8"))
    path, ids = folder / TOKENS, stored["ids"]
    # an empty file cannot be mapped
    tokens = np.memmap(path, np.int32, mode="r") if mapped and ids else np.fromfile(path, np.int32)
    with np.load(folder / INDEX) as index:
        return Dataset(
            tokens,
            prompt_lengths=index["prompt_lengths"],
            response_lengths=index["response_lengths"],
            ids=ids,
            account=TokenAccount.from_dict(stored["account"]),
            fingerprint=fingerprint,
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
