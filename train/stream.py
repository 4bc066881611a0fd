"""The micro-batches of a rank, from any step on, packed in a background process.

Owns their order. It is a function of the config, the seed and the rank alone, and so are the anchors drawn:
step n is the same whether or not a run was interrupted before it, and there is no state to save.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from train.config import TrainConfig
from train.dataset import Example, batches_by_length, num_batches
from train.distributed import World
from train.packing import PackedBatch, pack

PREFETCHED = 8  # micro-batches packed ahead


class Examples(Protocol):
    """What training needs of a data set. `lengths` are tokens of prompt and answer together."""

    @property
    def lengths(self) -> NDArray[np.int64]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Example: ...


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one rank, and whose examples it holds."""

    packed: PackedBatch
    ids: tuple[str, ...]

    def pin_memory(self) -> MicroBatch:
        """In page-locked memory; the DataLoader calls it."""
        return MicroBatch(packed=self.packed.pin_memory(), ids=self.ids)


class Plan:
    """Which examples each step of a rank takes.

    Args:
        mask_token_id: of the drafter; fills the blocks.

    Raises:
        ValueError: fewer examples than one optimiser step takes.
    """

    def __init__(self, examples: Examples, config: TrainConfig, *, world: World, mask_token_id: int) -> None:
        self._examples = examples
        self._config = config
        self._world = world
        self._mask_token_id = mask_token_id
        self.accumulation = config.batch.accumulation(world.size)
        batches = num_batches(len(examples), rows_per_batch=config.batch.rows, world_size=world.size)
        self.steps_per_epoch = batches // self.accumulation
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"there are {len(examples)} examples to train on, one step takes batch.global_size = "
                f"{config.batch.global_size}: give more, or make the batch smaller"
            )
        whole = self.steps_per_epoch * config.limits.epochs
        self.total_steps = min(whole, config.limits.max_steps or whole)

    def micro_batches(self, *, first_step: int) -> Iterator[MicroBatch]:
        """All micro-batches of this rank, `accumulation` for each step, from `first_step` (0-based) on."""
        epoch, batches = -1, list[NDArray[np.int64]]()
        for step in range(first_step, self.total_steps):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                batches = self._batches(epoch)
            at = step % self.steps_per_epoch * self.accumulation
            for indices in batches[at : at + self.accumulation]:
                yield self._pack(indices, epoch=epoch)

    def _batches(self, epoch: int) -> list[NDArray[np.int64]]:
        return batches_by_length(
            self._examples.lengths,
            rows_per_batch=self._config.batch.rows,
            epoch=epoch,
            seed=self._config.seed,
            rank=self._world.rank,
            world_size=self._world.size,
        )

    def _pack(self, indices: NDArray[np.int64], *, epoch: int) -> MicroBatch:
        config = self._config
        examples = [self._examples[int(i)] for i in indices]
        packed = pack(
            examples,
            block_size=config.model.block_size,
            num_anchors=config.packing.num_anchors,
            gamma=config.packing.gamma,
            mask_token_id=self._mask_token_id,
            generator=np.random.default_rng([config.seed, epoch, *map(int, indices)]),
            multiple_of=config.packing.multiple_of,
        )
        return MicroBatch(packed=packed, ids=tuple(example.id for example in examples))


class _Stream(IterableDataset[MicroBatch]):
    def __init__(self, plan: Plan, *, first_step: int) -> None:
        self._plan = plan
        self._first_step = first_step

    def __iter__(self) -> Iterator[MicroBatch]:
        return self._plan.micro_batches(first_step=self._first_step)


def steps(plan: Plan, *, first_step: int, pin: bool) -> Iterator[list[MicroBatch]]:
    """The micro-batches of each step, prepared by one process in the background.

    One is enough: packing takes numpy a millisecond a row. `pin` puts them in page-locked memory.
    """
    loader = DataLoader(
        _Stream(plan, first_step=first_step),
        batch_size=None,
        num_workers=1,
        prefetch_factor=PREFETCHED,
        pin_memory=pin,
    )
    batches = iter(loader)
    for _ in range(first_step, plan.total_steps):
        yield [next(batches) for _ in range(plan.accumulation)]
