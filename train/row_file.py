"""A JSON Lines file that grows a row at a time and keeps every row already in it, whatever happens."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

SYNC_SECONDS = 1.0
_READ_BLOCK = 1 << 16


class RowFile:
    """Appends rows. Opening one drops a last line that an interruption left half-written.

    A row is whole in the file or not in it: after a failed write, as on a full disk, the file is cut back to
    the rows before. Rows reach the disk once a second and on closing. One process at a time may write it.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        """Open or create the file; `fresh` empties it.

        Raises:
            ValueError: another process is writing it.
            OSError: it cannot be written.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise ValueError(
                f"{path} is being written by another process: wait for it, or stop it"
            ) from error
        self._size = 0 if fresh else self._end_of_rows()
        os.ftruncate(self._file, self._size)
        self._synced = time.monotonic()

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row.

        Raises:
            OSError: the write failed; the rows before it are whole.
        """
        rest = memoryview(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        size = self._size + len(rest)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size = size
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Wait until all rows are on the disk."""
        os.fsync(self._file)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Sync and give the file free."""
        try:
            self.sync()
        finally:
            os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _end_of_rows(self) -> int:
        """Just after the last line break, searched backwards."""
        end = os.fstat(self._file).st_size
        while end > 0:
            start = max(0, end - _READ_BLOCK)
            found = os.pread(self._file, end - start, start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
        return 0


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears under its name only when it is complete and on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
