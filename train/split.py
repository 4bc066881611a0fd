"""Sets two development sets aside from the training prompts; nothing is ever trained on them.

    python -m train.split --prompts prompts.jsonl.gz --out DIR          apply the sets whose ids are committed
    python -m train.split --prompts prompts.jsonl.gz --ids DIR --draw   draw other ones, once

The first set chooses what to prune, the second checkpoints and depth; so they have no prompt in common, and
the benchmark sets choose nothing. Writes train.jsonl, dev1.jsonl and dev2.jsonl.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from train.conversations import MAX_REFUSED_SHARE, Line, Prompt, read_prompts
from train.row_file import write_whole

NAMES = ("dev1", "dev2")
SIZE = 512
SEED = 0
COMMITTED = Path(__file__).resolve().parent / "splits"
MAX_SHOWN = 3
EXIT_USER_ERROR = 2


@dataclass(frozen=True)
class Row:
    """A prompt and its line in the file, which is copied as it is."""

    prompt: Prompt
    line: Line


def draw(ids: Iterable[str], *, size: int = SIZE, seed: int = SEED) -> dict[str, list[str]]:
    """Two disjoint random sets of `size` ids, each sorted.

    They depend on the ids and the seed alone, not on the order of the file or on a library's generator.

    Raises:
        ValueError: there are not enough ids to leave any to train on.
    """
    if size < 1:
        raise ValueError(f"size is {size}, allowed are 1 and more")
    shuffled = sorted(set(ids), key=lambda one: hashlib.sha256(f"{seed}:{one}".encode()).digest())
    needed = len(NAMES) * size
    if needed >= len(shuffled):
        raise ValueError(f"{needed} prompts are to be set aside, there are only {len(shuffled)}")
    return {name: sorted(shuffled[i * size : (i + 1) * size]) for i, name in enumerate(NAMES)}


def read_ids(folder: Path) -> dict[str, list[str]]:
    """The ids of both sets, one a line in dev1.txt and dev2.txt.

    Raises:
        ValueError: a file is missing or empty, or an id is there twice.
    """
    sets: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for name in NAMES:
        path = folder / f"{name}.txt"
        if not path.is_file():
            raise ValueError(f"no file {path}: draw the sets with --draw")
        sets[name] = [line for line in path.read_text(encoding="utf-8").split("\n") if line]
        if not sets[name]:
            raise ValueError(f"{path} holds no ids")
        for one in sets[name]:
            if one in owner:
                raise ValueError(f"id {one!r} is in {owner[one]} and in {name}: the sets must be disjoint")
            owner[one] = name
    return sets


def write_ids(sets: Mapping[str, Sequence[str]], folder: Path) -> None:
    """Inverse of `read_ids`.

    Raises:
        ValueError: there are such files already: a new draw would put old development prompts into training.
    """
    for name in sets:
        path = folder / f"{name}.txt"
        if path.exists():
            raise ValueError(f"{path} exists: what was measured on it would not compare, remove it first")
        broken = next((one for one in sets[name] if "\n" in one), None)
        if broken is not None:
            raise ValueError(f"id {broken!r} has a line break")
    for name, ids in sets.items():
        write_whole(folder / f"{name}.txt", "".join(f"{one}\n" for one in ids).encode())


def split(rows: Sequence[Row], sets: Mapping[str, Sequence[str]]) -> dict[str, list[Row]]:
    """The rows of "train", "dev1" and "dev2", in the order of the file.

    Raises:
        ValueError: an id of a set is not among the rows, nothing is left to train on, or a prompt stands,
            word for word, in two of the three.
    """
    place = {one: name for name, ids in sets.items() for one in ids}
    missing = place.keys() - {row.prompt.id for row in rows}
    if missing:
        raise ValueError(
            f"{len(missing)} ids of the development sets are not among the prompts: {_some(missing)}"
        )
    parts: dict[str, list[Row]] = {name: [] for name in ("train", *NAMES)}
    for row in rows:
        parts[place.get(row.prompt.id, "train")].append(row)
    if not parts["train"]:
        raise ValueError("no prompts are left to train on")
    _check_texts(parts)
    return parts


def _check_texts(parts: Mapping[str, Sequence[Row]]) -> None:
    seen: dict[tuple[str | None, tuple[str, ...]], tuple[str, str]] = {}
    twice = []
    for name in (*NAMES, "train"):
        for row in parts[name]:
            text = (row.prompt.system, row.prompt.turns)
            earlier, earlier_id = seen.get(text, (name, ""))
            if earlier != name:
                twice.append(f"{row.prompt.id} of {name} = {earlier_id} of {earlier}")
            elif name != "train":  # only what is set aside must not come again
                seen[text] = (name, row.prompt.id)
    if twice:
        raise ValueError(
            f"{len(twice)} prompts are in two sets, word for word, under different ids: {_some(twice)}. "
            "Remove the repetitions from the prompts"
        )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - MAX_SHOWN
    return ", ".join(ordered[:MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        if not args.draw and args.out is None:
            raise ValueError("--out is missing")
        reader = read_prompts(args.prompts, max_refused_share=args.max_refused_share)
        rows = [Row(prompt, line) for line, prompt in reader.with_lines()]
        if args.draw:
            sets = draw((row.prompt.id for row in rows), size=args.size, seed=args.seed)
            split(rows, sets)
            write_ids(sets, args.ids)
            print(f"{args.ids}: " + ", ".join(f"{name}.txt {len(ids)} ids" for name, ids in sets.items()))
        else:
            sets = read_ids(args.ids)
        if args.out is not None:
            for name, part in split(rows, sets).items():
                path = args.out / f"{name}.jsonl"
                write_whole(path, b"".join(row.line.content.rstrip(b"\r\n") + b"\n" for row in part))
                print(f"{path}: {len(part)} prompts")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    if reader.refusals:
        print(f"warning: {len(reader.refusals)} malformed rows left out, the first: {reader.refusals[0]}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train.split",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--prompts", required=True, type=Path, metavar="FILE", help=".jsonl or .jsonl.gz")
    add("--out", type=Path, metavar="DIR", help="folder for train.jsonl, dev1.jsonl, dev2.jsonl")
    add("--ids", type=Path, default=COMMITTED, metavar="DIR", help="folder of dev1.txt and dev2.txt")
    add("--draw", action="store_true", help="draw the ids and write them to --ids")
    add("--size", type=int, default=SIZE, help="prompts of each drawn set (default: %(default)s)")
    add("--seed", type=int, default=SEED, help="of the draw (default: %(default)s)")
    add("--max-refused-share", type=float, default=MAX_REFUSED_SHARE, help="of malformed rows, then stop")
    return parser


if __name__ == "__main__":
    sys.exit(main())
