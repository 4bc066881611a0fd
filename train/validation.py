"""Exact greedy tau of the drafter in training, on the target's own greedy answers.

Owns dividing the answers among the ranks and adding up what they find; the measuring is `evaluate`'s. Every
rank makes the same number of passes, since under ZeRO-3 each of them gathers weights from all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

import numpy as np
import torch

from train.acceptance import Acceptance
from train.answer_drafts import plan_passes
from train.config import TrainConfig
from train.dataset import Example
from train.distributed import World, gather_objects
from train.evaluate import evaluate_examples
from train.model import TrainModel


class Validator:
    """Measures one drafter again and again on the same answers.

    Args:
        examples: with the target's greedy answers.

    Raises:
        ValueError: there are none, or one is too long for `validation.batch_tokens`.
    """

    def __init__(self, examples: Sequence[Example], config: TrainConfig, *, world: World) -> None:
        if not examples:
            raise ValueError(f"data.dev is {config.data.dev!r}: it must hold at least one usable answer")
        self._config = config
        shares = [examples[rank :: world.size] for rank in range(world.size)]
        passes = [self._num_passes(share) for share in shares]
        self._own = shares[world.rank]
        self._missing = max(passes) - passes[world.rank]

    @torch.no_grad()
    def measure(self, model: TrainModel) -> Acceptance:
        """Acceptance over the answers of all ranks. On all ranks."""
        # Other shapes than in training: compiling layers for them would take longer than not to.
        eager = self._config.compile and self._config.attention != "flex"
        with torch.compiler.set_stance("force_eager" if eager else "default"):
            own = self._evaluate(model, self._own) if self._own else self._nothing()
            for _ in range(self._missing):
                self._evaluate(model, [_shortest(model)])
        return reduce(add, gather_objects(own))

    def _evaluate(self, model: TrainModel, examples: Sequence[Example]) -> Acceptance:
        settings = self._config.validation
        return evaluate_examples(
            model,
            examples,
            block_size=self._config.model.block_size,
            coverage=settings.coverage,
            fanout=settings.fanout,
            batch_tokens=settings.batch_tokens,
        )

    def _nothing(self) -> Acceptance:
        settings = self._config.validation
        return Acceptance.none(
            block_size=self._config.model.block_size, coverage=settings.coverage, fanout=settings.fanout
        )

    def _num_passes(self, examples: Sequence[Example]) -> int:
        lengths = [(len(example.prompt_ids), len(example.response_ids)) for example in examples]
        batch_tokens = self._config.validation.batch_tokens
        return len(plan_passes(lengths, block_size=self._config.model.block_size, batch_tokens=batch_tokens))


def _shortest(model: TrainModel) -> Example:
    """An answer with one anchor: one pass."""
    token = 0 if model.mask_token_id else 1
    return Example(
        id="spare", prompt_ids=np.array([token], np.int32), response_ids=np.array([token] * 2, np.int32)
    )
