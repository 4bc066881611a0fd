"""The order of micro-batches: a function of the config and the step alone."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from train.config import load_config
from train.distributed import World
from train.stream import MicroBatch, Plan, steps
from train.synthetic import SyntheticExamples

MASK = 31
NUM_EXAMPLES = 22


def plan_of(tmp_path: Path, *overrides: str, rank: int = 0, size: int = 1) -> Plan:
    path = tmp_path / "config.yaml"
    settings = {
        "out": "x",
        "model": {"path": "a", "target": "b", "block_size": 4},
        "data": {"synthetic": NUM_EXAMPLES},
        "packing": {"num_anchors": 3, "multiple_of": 4},
        "batch": {"global_size": 4, "rows": 1},
        "limits": {"epochs": 3},
        "validation": {"coverage": 3},
    }
    path.write_text(json.dumps(settings))
    examples = SyntheticExamples(count=NUM_EXAMPLES, length=16, num_ids=32, mask_token_id=MASK, seed=0)
    world = World(rank=rank, size=size, local_rank=rank)
    return Plan(examples, load_config(path, overrides=overrides), world=world, mask_token_id=MASK)


def ids(batches: list[MicroBatch]) -> list[str]:
    return [one for batch in batches for one in batch.ids]


def same(ours: MicroBatch, theirs: MicroBatch) -> bool:
    tensors = [
        (one.packed.token_ids, one.packed.layout.ctx, one.packed.diff.labels) for one in (ours, theirs)
    ]
    return ours.ids == theirs.ids and all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))


def test_an_epoch_takes_every_example_once_up_to_whole_steps(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert (plan.accumulation, plan.steps_per_epoch, plan.total_steps) == (4, 5, 15)
    taken = ids(list(plan.micro_batches(first_step=0)))
    epochs = [taken[i : i + 20] for i in (0, 20, 40)]
    assert all(len(set(epoch)) == 20 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("first", [0, 1, 4, 5, 7, 14, 15])
def test_a_resumed_stream_is_the_rest_of_a_whole_one(tmp_path: Path, first: int) -> None:
    plan = plan_of(tmp_path)
    whole = list(plan.micro_batches(first_step=0))
    rest = list(plan.micro_batches(first_step=first))
    assert len(rest) == (15 - first) * 4
    assert all(same(a, b) for a, b in zip(whole[first * 4 :], rest, strict=True))


def test_ranks_share_the_examples_of_a_step(tmp_path: Path) -> None:
    streams = [
        list(plan_of(tmp_path, "batch.rows=2", rank=rank, size=2).micro_batches(first_step=0))
        for rank in (0, 1)
    ]
    assert len(streams[0]) == len(streams[1]) == 15
    for ours, theirs in zip(*streams, strict=True):
        assert not set(ours.ids) & set(theirs.ids)


def test_anchors_differ_between_epochs_and_seeds(tmp_path: Path) -> None:
    def anchors(*overrides: str) -> dict[tuple[int, str], list[int]]:
        plan = plan_of(tmp_path, *overrides)
        batches = list(plan.micro_batches(first_step=0))
        return {
            (i // 20, batch.ids[0]): batch.packed.layout.ctx[0, 16::4].tolist()
            for i, batch in enumerate(batches)
        }

    found, other = anchors(), anchors("seed=1")
    both = [name for epoch, name in found if epoch == 0 and (1, name) in found]
    assert len(both) > 10
    assert sum(found[0, name] != found[1, name] for name in both) > len(both) // 2
    common = found.keys() & other.keys()
    assert sum(found[key] != other[key] for key in common) > len(common) // 2


def test_the_background_process_gives_the_same(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    direct = list(plan.micro_batches(first_step=12))
    loaded = list(steps(plan, first_step=12, pin=False))
    assert [len(batches) for batches in loaded] == [4, 4, 4]
    assert all(same(a, b) for a, b in zip(direct, itertools.chain(*loaded), strict=True))


def test_max_steps_ends_a_run_and_bounds_it(tmp_path: Path) -> None:
    assert plan_of(tmp_path, "limits.max_steps=7").total_steps == 7
    assert plan_of(tmp_path, "limits.max_steps=70").total_steps == 15


def test_too_few_examples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"22 examples .* batch\.global_size = 24"):
        plan_of(tmp_path, "batch.global_size=24")


def test_synthetic_rows_are_whole_and_without_the_mask() -> None:
    examples = SyntheticExamples(count=3, length=64, num_ids=8, mask_token_id=5, seed=1)
    for i in range(3):
        tokens = np.concatenate([examples[i].prompt_ids, examples[i].response_ids])
        assert len(tokens) == 64 == examples.lengths[i]
        assert set(tokens.tolist()) == {0, 1, 2, 3, 4, 6, 7}
        assert np.array_equal(tokens, np.concatenate([examples[i].prompt_ids, examples[i].response_ids]))
    assert not np.array_equal(examples[0].response_ids, examples[1].response_ids)
