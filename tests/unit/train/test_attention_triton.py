"""The Triton kernels of training attention in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_kernels_in_the_interpreter() -> None:
    """In a process of its own: see `interpreted_attention.py`."""
    cases = Path(__file__).with_name("interpreted_attention.py")
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
