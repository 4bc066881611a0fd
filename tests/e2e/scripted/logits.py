"""The scripted drafter as `reference.py` wants a drafter: tokens in, logits out.

Legend: B block size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import one_hot

from tests.e2e.scripted.script import Scene, Script


def scripted_logits(
    script: Script, scene: Scene, *, block_size: int, vocab_size: int
) -> Callable[[Sequence[int]], torch.Tensor]:
    """Tokens of `scene`, the last one the anchor -> logits `[B-1, V]` whose largest are the candidates."""

    def forward(tokens: Sequence[int]) -> torch.Tensor:
        candidates = script.candidates(scene, len(tokens) - 1, block_size=block_size)
        return one_hot(torch.tensor(candidates), vocab_size).float()

    return forward
