"""The loop as it is started, on two ranks and then on one: R8, R9, and what must be refused.

All of it runs in two launches (`launches.py`), which the tests share: a start costs more than the steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from d3d_sglang.drafter.checkpoint import read_drafter
from d3d_sglang.drafter.export import tensors_sha256
from tests.unit.train.launches import HALF, STAGES, STEPS, write_inputs

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT = 240

pytestmark = pytest.mark.timeout(2 * TIMEOUT)


def launch(*arguments: str) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "CC": "/bin/false"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Left behind by a launch on two ranks."""
    folder = tmp_path_factory.mktemp("launches")
    write_inputs(folder)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m")
    launch(*torchrun, "tests.unit.train.launches", "two_ranks", str(folder))
    return folder


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[dict[str, Any]]:
    """What each rank saw."""
    return [json.loads((folder / f"two_ranks-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> dict[str, Any]:
    """What a launch on one rank saw afterwards in the same folder."""
    launch("tests.unit.train.launches", "one_rank", str(folder))
    seen: dict[str, Any] = json.loads((folder / "one_rank-0.json").read_text())
    return seen


def losses(out: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def test_weights_move_at_the_papers_learning_rate(two_ranks: list[dict[str, Any]]) -> None:
    """R8: over 90% of the matrices' values, and the norms, which in bf16 would stay at 1."""
    straight = two_ranks[0]["straight"]
    assert straight["dtypes"] == ["torch.float32"]
    moved, total = 0.0, 0
    for name, shape in straight["shapes"].items():
        if len(shape) == 2:
            moved += straight["moved"][name] * shape[0] * shape[1]
            total += shape[0] * shape[1]
        else:
            assert straight["moved"][name] > 0.9, name
    assert moved / total > 0.9


def test_the_optimisers_state_is_8_bit_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    for seen in two_ranks:
        assert seen["straight"]["state"] == ["torch.uint8"] * 2


def test_a_run_in_two_launches_has_the_same_curve(folder: Path, two_ranks: list[dict[str, Any]]) -> None:
    """R8: resumed at half. 1e-3 is what reducing bf16 gradients may cost; the curve itself moves more."""
    straight, resumed = losses(folder / "straight"), losses(folder / "resumed")
    assert sorted(straight) == sorted(resumed) == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        assert resumed[step] == pytest.approx(straight[step], abs=1e-3), step
    assert max(straight.values()) - min(straight.values()) > 0.01
    weights = [load_file(folder / out / "last/model.safetensors") for out in ("straight", "resumed")]
    assert tensors_sha256(weights[0]) == tensors_sha256(weights[1])


def test_the_first_launch_stopped_at_half(folder: Path, two_ranks: list[dict[str, Any]]) -> None:
    kept = sorted(path.name for path in (folder / "resumed/checkpoints").iterdir())
    assert kept == ["latest", f"step-{HALF:07d}", f"step-{STEPS:07d}"]


@pytest.mark.parametrize("stage", STAGES)
def test_exports_are_the_same_at_every_stage(
    folder: Path, two_ranks: list[dict[str, Any]], stage: int
) -> None:
    """R9: whole tensors, equal weights, a drafter that loads as a plain language model."""
    out = folder / f"stage-{stage}"
    stored = load_file(out / "model.safetensors")
    assert all(tensor.numel() for tensor in stored.values())
    provenance = json.loads((out / "provenance.json").read_text())
    assert provenance["weights_sha256"] == tensors_sha256(stored)
    source = load_file(folder / "model/model.safetensors")
    assert tensors_sha256(stored) == tensors_sha256({k: v.bfloat16() for k, v in source.items()})
    drafter = read_drafter(out)
    assert drafter.d3d_config.block_size == 4 and drafter.dtype == torch.bfloat16
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.isfinite(model(torch.tensor([[7, 8, 9]])).logits).all()


@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(two_ranks: list[dict[str, Any]], stage: int) -> None:
    for seen in two_ranks:
        guard = seen["guard"][str(stage)]
        assert guard["applied"] == [False, False, True]
        assert guard["still"]
        gradient, loss = guard["said"]
        assert gradient.startswith("step 1 was skipped: the gradient of lm.model.")
        assert gradient.endswith("is not finite")
        assert loss.startswith("step 2 was skipped: the loss is not finite (total nan") and "row-" in loss
    assert two_ranks[0]["guard"] == two_ranks[1]["guard"]


def test_another_number_of_ranks_is_refused(one_rank: dict[str, Any]) -> None:
    message = one_rank["world_size"]
    assert "was written by 2 rank(s), this run has 1" in message and "resume with 2" in message


def test_a_full_disk_leaves_the_earlier_checkpoint(one_rank: dict[str, Any]) -> None:
    disk = one_rank["disk"]
    assert "step 2 could not be written" in disk["failed"]
    assert "step-0000001 is intact" in disk["failed"]
    assert "nothing was written" in disk["refused"] and "0.00 GB free" in disk["refused"]
    assert disk["after"] == disk["before"]
    assert disk["resumed_at"] == 1


def test_master_weights_are_fp32_without_zero(one_rank: dict[str, Any]) -> None:
    assert set(one_rank["stage_0"]["masters"]) == {"torch.float32"}
