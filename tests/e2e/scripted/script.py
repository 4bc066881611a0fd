"""What a scripted drafter proposes: the target's own continuation of a prompt, with seeded errors.

The error of a block, and whether the right token is among the next likely ones there, are drawn from (seed,
prompt, tokens before the anchor) alone, so what a round proposes does not depend on batches, restarts or the
process that asks. With a script of the target's greedy answers the accept length of a block is where its
error is. Needs neither SGLang nor the package under test.

Legend: B block size, K support size, C coverage, F fanout.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# Proposed where the script says nothing; any token would do.
FILLER = 1
NO_ERROR = 0.25  # share of blocks that are right to the end
# Place of the right token in the order of an error's position, 0 for none: with F 1 two in five errors are
# foreseen, with F 2 three in five.
RANKS = (1, 1, 2, 0, 0)


@dataclass(frozen=True)
class Scene:
    """One prompt and how it goes on. `number` is its place in the script."""

    number: int
    prompt_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.continuation_ids

    def fits(self, token_ids: Sequence[int]) -> bool:
        """Whether `token_ids` are the prompt, alone or with a part of the continuation."""
        return len(token_ids) >= len(self.prompt_ids) and self.token_ids[: len(token_ids)] == tuple(token_ids)


@dataclass(frozen=True)
class Outcome:
    """One round: how it ended, and where the next proposal comes from.

    Attributes:
        origin: of this round's proposal: redraft, hit or full.
        leads_to: hit or full, if the outcome was drafted ahead. Otherwise miss after a rejection, lost after
            full acceptance.
    """

    origin: str
    prop_len: int
    accept_len: int
    leads_to: str


@dataclass(frozen=True)
class Script:
    """Scenes and the seed of their errors."""

    scenes: tuple[Scene, ...]
    seed: int = 0

    @classmethod
    def of(cls, answers: Sequence[tuple[Sequence[int], Sequence[int]]], *, seed: int = 0) -> Script:
        """Script of (prompt ids, continuation ids) pairs."""
        scenes = [Scene(i, tuple(prompt), tuple(answer)) for i, (prompt, answer) in enumerate(answers)]
        return cls(tuple(scenes), seed)

    @classmethod
    def load(cls, path: Path) -> Script:
        """Read what `save` wrote."""
        stored = json.loads(path.read_text())
        return cls.of(
            [(scene["prompt_ids"], scene["continuation_ids"]) for scene in stored["scenes"]],
            seed=stored["seed"],
        )

    def save(self, path: Path) -> None:
        """Write as JSON."""
        scenes = [
            {"prompt_ids": scene.prompt_ids, "continuation_ids": scene.continuation_ids}
            for scene in self.scenes
        ]
        path.write_text(json.dumps({"seed": self.seed, "scenes": scenes}))

    def with_seed(self, seed: int) -> Script:
        """The same scenes, other errors."""
        return replace(self, seed=seed)

    def find(self, token_ids: Sequence[int]) -> Scene | None:
        """The scene that `token_ids` (a prompt, possibly with the start of its answer) belong to."""
        # Of two scenes that fit, the longer prompt is the more specific one.
        fitting = [scene for scene in self.scenes if scene.fits(token_ids)]
        return max(fitting, key=lambda scene: len(scene.prompt_ids), default=None)

    def candidates(self, scene: Scene | None, committed_len: int, *, block_size: int) -> list[int]:
        """B-1 candidates after an anchor that has `committed_len` tokens before it and is the script's."""
        return [ranks[0] for ranks in self._block(scene, committed_len, block_size=block_size, support=1)]

    def ranked(
        self, scene: Scene | None, committed_len: int, *, anchor: int, block_size: int, support: int
    ) -> list[list[int]]:
        """The K most likely tokens of each of the B-1 positions after `anchor`, the candidate first.

        After an anchor that is not the script's they are the same continuation, with an error of their own,
        so that the block is of some use at these positions, but another one. Ids stay below the vocabulary if
        that has more than 2 K of them.
        """
        expected = scene.token_ids[committed_len : committed_len + 1] if scene else ()
        other = None if expected in ((anchor,), ()) else anchor
        return self._block(scene, committed_len, block_size=block_size, support=support, other_anchor=other)

    def error_position(
        self, scene: Scene, committed_len: int, *, block_size: int, other_anchor: int | None = None
    ) -> int:
        """Index of the wrong candidate, 0 to B-2, all equally likely, or B-1 for none.

        `other_anchor` is an anchor that is not the script's.
        """
        coins = self._coins(
            "error" if other_anchor is None else f"after {other_anchor}", scene, committed_len
        )
        return block_size - 1 if coins.random() < NO_ERROR else coins.randrange(block_size - 1)

    def error_rank(self, scene: Scene, committed_len: int) -> int:
        """Place of the right token among the likely ones where the error is, from 1, or 0 for none."""
        return self._coins("rank", scene, committed_len).choice(RANKS)

    def outcomes(self, *, block_size: int, coverage: int, fanout: int) -> list[Outcome]:
        """Rounds of a server whose target answers as scripted; a last round cut short is left out.

        Rows that missed are drafted on demand. Coverage 0 stands for synchronous drafting.
        """
        return [
            outcome
            for scene in self.scenes
            for outcome in self._outcomes(scene, block_size=block_size, coverage=coverage, fanout=fanout)
        ]

    def accept_lengths(self, *, block_size: int) -> list[int]:
        """Accept lengths of a synchronous server, as in `outcomes`."""
        return [done.accept_len for done in self.outcomes(block_size=block_size, coverage=0, fanout=0)]

    def seeded_for_all_outcomes(
        self, *, block_size: int, coverage: int, fanout: int, tries: int = 1000
    ) -> Script:
        """The first seed from ours on with which asynchronous drafting meets everything.

        That is a hit at every position below C-1, a miss at every position, and full acceptance drafted ahead
        of B-1 and of B-2 candidates.

        Raises:
            ValueError: no such seed among `tries`: the script is too short for the block.
        """
        wanted = {("hit", position) for position in range(coverage - 1)}
        wanted |= {("miss", position) for position in range(block_size - 1)}
        wanted |= {("full", block_size - 1), ("full", block_size - 2)}

        def met(script: Script) -> list[Hashable]:
            outcomes = script.outcomes(block_size=block_size, coverage=coverage, fanout=fanout)
            return [(done.leads_to, done.accept_len) for done in outcomes]

        return self._seeded(wanted, met, tries=tries)

    def _seeded(
        self, wanted: set[Hashable], met: Callable[[Script], Sequence[Hashable]], *, tries: int
    ) -> Script:
        for seed in range(self.seed, self.seed + tries):
            script = self.with_seed(seed)
            if wanted <= set(met(script)):
                return script
        raise ValueError(f"{tries} seeds without all of {sorted(map(str, wanted))}: the script is too short")

    def _coins(self, use: str, scene: Scene, committed_len: int) -> random.Random:
        # A text seed is hashed by SHA-512: the same in every process and Python.
        return random.Random(f"{self.seed}/{use}/{scene.prompt_ids}/{committed_len}")

    def _block(
        self,
        scene: Scene | None,
        committed_len: int,
        *,
        block_size: int,
        support: int,
        other_anchor: int | None = None,
    ) -> list[list[int]]:
        """As `ranked`; without a scene it is filler."""
        start, count = committed_len + 1, block_size - 1
        right = list(scene.token_ids[start : start + count]) if scene else []
        right += [FILLER] * (count - len(right))
        ranked = [[token, *_others(token, support)][:support] for token in right]
        if scene is None:
            return ranked
        error = self.error_position(scene, committed_len, block_size=block_size, other_anchor=other_anchor)
        if error < count:
            # Right again after the error: a verify that looks past the first mismatch would be seen.
            wrong, rank = _others(right[error], support), self.error_rank(scene, committed_len)
            ranked[error] = [*wrong[:rank], right[error], *wrong[rank:]][:support] if rank else wrong
        return ranked

    def _outcomes(self, scene: Scene, *, block_size: int, coverage: int, fanout: int) -> Iterator[Outcome]:
        committed_len = len(scene.prompt_ids)  # the first token comes from the prefill
        origin = "redraft"
        while committed_len + 1 < len(scene.token_ids):
            # A block drafted ahead of full acceptance starts a token earlier, with the bonus it guessed.
            ahead = int(origin == "full")
            drafted_at, prop_len = committed_len - ahead, block_size - 1 - ahead
            accept_len = self.error_position(scene, drafted_at, block_size=block_size) - ahead
            end = committed_len + accept_len
            if end + 1 >= len(scene.token_ids):
                return
            if accept_len == prop_len:
                guessed = self.error_position(scene, end, block_size=block_size) > 0
                leads_to = "full" if coverage and guessed else "lost"
            else:
                foreseen = 1 <= self.error_rank(scene, drafted_at) <= fanout and accept_len < coverage - 1
                leads_to = "hit" if foreseen else "miss"
            yield Outcome(origin, prop_len, accept_len, leads_to)
            origin = leads_to if leads_to in ("hit", "full") else "redraft"
            committed_len = end + 1


def _others(token: int, count: int) -> list[int]:
    """Distinct ids other than `token`."""
    return [token + i if token < count else token - i for i in range(1, count + 1)]
