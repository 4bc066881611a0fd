"""What the identity bench runs: servers, from stock SGLang to every way of drafting, and how each is asked.

The order is by worth: what is interrupted early has shown the most. Knows neither how a server is started nor
what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SETS = ("gsm8k", "humaneval", "mbpp", "math500", "mt_bench")
MODES: Mapping[str, int] = {"one": 1, "eight": 8}  # requests at once
START_SECONDS = 45.0  # of a server; this and `Server.seconds` are rough, for two cores


@dataclass(frozen=True)
class Settings:
    """What is asked and of whom. `only` keeps the runs whose names contain one of its texts; empty: all."""

    sets: tuple[str, ...] = SETS
    prompts_per_set: int = 8
    num_tokens: int = 64
    block_size: int = 16
    layers: tuple[int, ...] = (28, 29)  # 0 and 29 propose one token whatever the context
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Server:
    """One way to serve.

    Attributes:
        drafter: "plain" for none; "scripted"; "cut": some of the target's layers; "whole": all of them.
        mode: sync or async; coverage, fanout and miss are those of async.
        few: asked only the first conversation of every set.
        seconds: an answer takes about, one at a time and eight at once.
    """

    drafter: str
    mode: str = ""
    coverage: int = 0
    fanout: int = 0
    miss: str = ""
    few: bool = False
    seconds: tuple[float, float] = (5.0, 1.5)

    @property
    def is_async(self) -> bool:
        return self.mode == "async"

    @property
    def name(self) -> str:
        parts = [self.drafter, self.mode]
        if self.is_async:
            parts += [f"c{self.coverage}f{self.fanout}", self.miss]
        return "-".join(filter(None, parts))

    @property
    def flags(self) -> tuple[str, ...]:
        """The drafting options; no default is relied on."""
        if not self.is_async:
            return ("--d3d-mode", self.mode) if self.mode else ()
        return (
            *("--d3d-mode", self.mode, "--d3d-miss", self.miss),
            *("--d3d-coverage", str(self.coverage), "--d3d-fanout", str(self.fanout)),
        )


@dataclass(frozen=True)
class Run:
    """One server asked in one mode."""

    server: Server
    mode: str

    def __str__(self) -> str:
        return f"{self.server.name}-{self.mode}"

    @property
    def at_once(self) -> int:
        """Requests running at any time."""
        return MODES[self.mode]

    @property
    def seconds(self) -> float:
        """An answer takes about."""
        return self.server.seconds[list(MODES).index(self.mode)]


PLAIN = Server("plain")
REFERENCE = Run(PLAIN, "one")
PLAIN_BATCH = Run(PLAIN, "eight")  # shows what batching alone does to tokens


def planned_servers(block_size: int) -> tuple[Server, ...]:
    """All servers, the plain one first.

    The untrained drafter "cut" accepts nothing, "whole" a candidate now and then. The script meets every
    outcome: with C = B each position can hit and miss, with C 4 a sibling is now a branch, now the rest of
    the block.
    """

    def ahead(drafter: str, coverage: int, fanout: int, miss: str, **others: object) -> Server:
        return Server(drafter, "async", min(coverage, block_size), fanout, miss, **others)  # type: ignore[arg-type]

    def few(drafter: str, miss: str, seconds: tuple[float, float]) -> Server:
        return ahead(drafter, 12, 2, miss, few=True, seconds=seconds)

    return (
        PLAIN,
        ahead("scripted", block_size, 2, "redraft", seconds=(3.0, 1.0)),
        ahead("scripted", 4, 1, "sibling", seconds=(3.0, 1.0)),
        Server("scripted", "sync", seconds=(2.5, 0.7)),
        ahead("cut", 4, 1, "redraft", seconds=(20.0, 10.0)),
        Server("cut", "sync", seconds=(14.0, 7.0)),
        few("scripted", "redraft", (3.0, 1.0)),
        few("scripted", "sibling", (3.0, 1.0)),
        few("cut", "redraft", (35.0, 30.0)),
        few("cut", "sibling", (35.0, 30.0)),
        ahead("whole", 4, 1, "redraft", few=True, seconds=(60.0, 40.0)),
        Server("whole", "sync", few=True, seconds=(25.0, 10.0)),
    )


def planned_runs(settings: Settings) -> tuple[Run, ...]:
    """The runs of `settings` in their order; the reference is always the first.

    Raises:
        ValueError: a text of `only` is in no run's name.
    """
    runs = [Run(server, mode) for server in planned_servers(settings.block_size) for mode in MODES]
    for text in settings.only:
        if not any(text in str(run) for run in runs):
            raise ValueError(f"no run is named {text!r}: the runs are {', '.join(map(str, runs))}")
    wanted = [run for run in runs if not settings.only or any(text in str(run) for text in settings.only)]
    return (REFERENCE, *(run for run in wanted if run != REFERENCE))
