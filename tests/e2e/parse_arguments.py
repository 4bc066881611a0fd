"""Run as a program: takes server arguments through SGLang's own start-up path, without starting anything.

Reads a JSON object on stdin, name -> {"args": [...], "env": {...}}, and prints one, name -> what ended the
start-up ("ValueError: ..."), or null where it went through. One process for all: importing takes most of
the time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys

from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args


def outcome(args: list[str], env: dict[str, str]) -> str | None:
    """What `python -m sglang.launch_server` with these arguments and variables would end with."""
    before = dict(os.environ)
    os.environ.update(env)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            prepare_server_args(args).resolve_once()
    except SystemExit as end:
        # argparse ends with a number and says why on stderr.
        why = errors.getvalue().strip() if isinstance(end.code, int) else end.code
        return f"SystemExit: {why}"
    except Exception as error:  # whatever a user would see
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.clear()
        os.environ.update(before)
    return None


def main() -> None:
    load_plugins()
    starts = json.load(sys.stdin)
    print(json.dumps({name: outcome(start["args"], start["env"]) for name, start in starts.items()}))


if __name__ == "__main__":
    main()
