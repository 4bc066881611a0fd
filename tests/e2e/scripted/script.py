"""What a scripted drafter proposes: the target's own continuation of a prompt, with seeded errors.

The error of a block is drawn from (seed, prompt, committed length) alone, so the candidates of a round do not
depend on batches, restarts or the process that asks. With a script of the target's greedy answers the accept
length of a block is where its error is. Needs neither SGLang nor the package under test.

Legend: B block size.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# Proposed where the script says nothing; any token would do.
FILLER = 1


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
        """B-1 candidates after an anchor that has `committed_len` tokens before it."""
        start, count = committed_len + 1, block_size - 1
        known = list(scene.token_ids[start : start + count]) if scene else []
        candidates = known + [FILLER] * (count - len(known))
        if scene is None:
            return candidates
        error = self.error_position(scene, committed_len, block_size=block_size)
        if error < count:
            # Right again after the error: a verify that looks past the first mismatch would be seen.
            candidates[error] += -1 if candidates[error] else 1
        return candidates

    def error_position(self, scene: Scene, committed_len: int, *, block_size: int) -> int:
        """Index of the wrong candidate, 0 to B-2, or B-1 for none; all are equally likely."""
        # A text seed is hashed by SHA-512: the same in every process and Python.
        return random.Random(f"{self.seed}/{scene.prompt_ids}/{committed_len}").randrange(block_size)

    def accept_lengths(self, *, block_size: int) -> list[int]:
        """Accept lengths of a server whose target answers as scripted; a last round cut short is left out."""
        lengths = []
        for scene in self.scenes:
            committed_len = len(scene.prompt_ids)  # the first token comes from the prefill
            while committed_len + 1 < len(scene.token_ids):
                left = len(scene.token_ids) - committed_len - 1
                error = self.error_position(scene, committed_len, block_size=block_size)
                if error < left:
                    lengths.append(error)
                committed_len += min(error, left) + 1
        return lengths

    def seeded_for_all_lengths(self, *, block_size: int, tries: int = 1000) -> Script:
        """The first seed from ours on with which every accept length 0..B-1 occurs.

        Raises:
            ValueError: no such seed among `tries`: the script is too short for the block.
        """
        wanted = set(range(block_size))
        for seed in range(self.seed, self.seed + tries):
            script = self.with_seed(seed)
            if wanted <= set(script.accept_lengths(block_size=block_size)):
                return script
        raise ValueError(f"{tries} seeds without all of 0..{block_size - 1}: the script is too short")
