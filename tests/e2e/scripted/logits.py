"""The scripted drafter as `reference.py` wants a drafter: tokens in, logits out.

Legend: B block size, V vocabulary, K support size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tests.e2e.scripted.script import Scene, Script

SUPPORT = 20  # K of the server's executor


def scripted_logits(
    script: Script, scene: Scene, *, block_size: int, vocab_size: int
) -> Callable[[Sequence[int]], torch.Tensor]:
    """Tokens of `scene`, the last one the anchor -> logits `[B-1, V]` that order the scripted tokens."""

    def forward(tokens: Sequence[int]) -> torch.Tensor:
        ranked = torch.tensor(
            script.ranked(scene, len(tokens) - 1, anchor=tokens[-1], block_size=block_size, support=SUPPORT)
        )  # [B-1, K]
        likely = torch.arange(SUPPORT, 0, -1, dtype=torch.float32).expand(len(ranked), -1)
        return torch.zeros(len(ranked), vocab_size).scatter(1, ranked, likely)

    return forward
