"""Random token rows in place of answers: what a step costs does not depend on what the tokens say."""

from __future__ import annotations

import numpy as np

from train.dataset import Example


class SyntheticExamples:
    """`count` examples of exactly `length` tokens, a quarter of them the prompt.

    Args:
        num_ids: ids are drawn from 0 to `num_ids - 1`.
        mask_token_id: never drawn.
    """

    def __init__(self, *, count: int, length: int, num_ids: int, mask_token_id: int, seed: int) -> None:
        self._ids = np.setdiff1d(np.arange(num_ids, dtype=np.int32), [mask_token_id])
        self._seed = seed
        self._length = length
        self.lengths = np.full(count, length)
        self.fingerprint = f"synthetic {count} x {length} of {num_ids}, seed {seed}"

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        tokens = np.random.default_rng([self._seed, index]).choice(self._ids, size=self._length)
        prompt = self._length // 4
        return Example(id=f"synthetic-{index}", prompt_ids=tokens[:prompt], response_ids=tokens[prompt:])
