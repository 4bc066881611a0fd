"""A growing file of rows: every row is whole or not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.train.regeneration_session import read
from train.row_file import RowFile

ROOT = Path(__file__).resolve().parents[3]


def test_a_real_partial_write_is_taken_back(tmp_path: Path) -> None:
    """A file-size limit stops a write in its middle, as a full disk does, and without a stand-in."""
    code = (
        "import resource, signal, sys; from pathlib import Path; from train.row_file import RowFile\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "rows = RowFile(Path(sys.argv[1]))\n"
        "for i in range(99): rows.append({'id': i, 'text': 'x' * 100})\n"
    )
    path = tmp_path / "rows.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True)
    assert "OSError: [Errno 27] File too large" in done.stderr
    assert [row["id"] for row in read(path)] == list(range(8))


def test_end_of_rows_is_found_over_blocks(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": 1}\n' + b"x" * 200_000)
    RowFile(path).close()
    assert path.read_bytes() == b'{"id": 1}\n'
    path.write_bytes(b"x" * 200_000)
    RowFile(path).close()
    assert path.read_bytes() == b""
