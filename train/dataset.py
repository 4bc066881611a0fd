"""Tokenised answers, and the order in which an epoch takes them.

Owns no files and no tokenizer: `train.dataset_build` makes a `Dataset` from rows of conversations. A length
here is that of prompt and response together, which decides the size of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from train.token_account import TokenAccount

# Batches are formed by length among so many at a time: enough to waste little padding, few enough that an
# epoch as a whole is in random order.
WINDOW_BATCHES = 64


@dataclass(frozen=True, eq=False)
class Example:
    """One answer of the target to one prompt.

    Attributes:
        prompt_ids: `[L]` int32, L >= 1: the chat template up to where the answer begins.
        response_ids: `[T]` int32, T >= 2: as generated. It ends with the end token, except where the answer
            was cut at max_tokens or here at the longest length.
    """

    id: str
    prompt_ids: np.ndarray
    response_ids: np.ndarray


class Dataset:
    """Examples by index, in the order of the files. Does not change; may be memory-mapped.

    Attributes:
        lengths: `[n]` int64, tokens of prompt and response.
        account: what became of the rows it was made from.
        fingerprint: changes with the content, so that a resumed run can tell whether it has the same one.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        prompt_lengths: np.ndarray,
        response_lengths: np.ndarray,
        ids: Sequence[str],
        account: TokenAccount,
        fingerprint: str,
    ) -> None:
        """`tokens` int32 holds prompt, response, prompt, ... of all examples; the lengths are `[n]` int64."""
        self.lengths: np.ndarray = prompt_lengths + response_lengths
        self.account = account
        self.fingerprint = fingerprint
        self._tokens = tokens
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self._prompt_lengths = prompt_lengths
        self._ids = ids
        assert len(ids) == len(self.lengths), f"{len(ids)} ids of {len(self.lengths)} examples"
        assert self._starts[-1] == len(tokens), f"{len(tokens)} tokens, {self._starts[-1]} expected"

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        """Example `index`; its arrays are copies.

        Raises:
            IndexError: there is no such example.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        tokens = np.array(self._tokens[self._starts[index] : self._starts[index + 1]])
        prompt_length = self._prompt_lengths[index]
        return Example(self._ids[index], tokens[:prompt_length], tokens[prompt_length:])


def num_batches(num_examples: int, *, rows_per_batch: int, world_size: int) -> int:
    """Batches of each rank in an epoch; what is over after whole ones on all ranks is left out."""
    return num_examples // (rows_per_batch * world_size)


def batches_by_length(
    lengths: Sequence[int] | np.ndarray,
    *,
    rows_per_batch: int,
    epoch: int,
    seed: int,
    rank: int,
    world_size: int,
    start: int = 0,
) -> list[np.ndarray]:
    """The batches of one rank in one epoch, each `[rows_per_batch]` int64 indices into `lengths`.

    The examples are shuffled; windows of `WINDOW_BATCHES` steps are sorted by length; neighbours go into one
    step, spread over the ranks so that all have as much to do; and the steps of a window are shuffled again.
    A function of its arguments alone: a run that resumes at batch `start` of an epoch takes what an
    uninterrupted one takes. Every rank gets the same number of batches, and no example comes twice. Of n
    examples, the last n mod (rows_per_batch * world_size) in the shuffled order are left out, other ones in
    every epoch.

    Raises:
        ValueError: an argument is out of range.
    """
    _check(rows_per_batch=(rows_per_batch, 1), world_size=(world_size, 1), epoch=(epoch, 0), seed=(seed, 0))
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, allowed are 0 to {world_size - 1}")
    count = num_batches(len(lengths), rows_per_batch=rows_per_batch, world_size=world_size)
    if not 0 <= start <= count:
        raise ValueError(f"start is {start}, allowed are 0 to {count}, the batches of an epoch")
    rows_per_step = rows_per_batch * world_size
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(lengths))[: count * rows_per_step]
    by_length = np.asarray(lengths)
    batches: list[np.ndarray] = []
    for first in range(0, len(order), WINDOW_BATCHES * rows_per_step):
        window = order[first : first + WINDOW_BATCHES * rows_per_step]
        window = window[np.argsort(by_length[window], kind="stable")]
        steps = window.reshape(-1, rows_per_batch, world_size)  # neighbours go to different ranks
        batches.extend(steps[i, :, rank] for i in generator.permutation(len(steps)))
    return batches[start:]


def _check(**arguments: tuple[int, int]) -> None:
    for name, (value, least) in arguments.items():
        if value < least:
            raise ValueError(f"{name} is {value}, allowed are {least} and more")
