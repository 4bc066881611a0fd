"""Mistakes at start-up reach the user through SGLang's own parser, as one message that says what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serve.launch import CPU_FLAGS, server_environment
from tests import tiny_folders as tiny

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240

# Flags on top of good ones -> parts of the message.
REFUSED_FLAGS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "tree": (["--speculative-eagle-topk", "4"], ("--speculative-eagle-topk is 4", "a chain, not a tree")),
    "lossy": (
        ["--speculative-accept-threshold-single", "0.9"],
        ("--speculative-accept-threshold-single is 0.9", "changes the output distribution"),
    ),
    "tensor parallel": (["--tp-size", "2"], ("--tp-size is 2", "tensor parallelism")),
    "prefill server": (["--disaggregation-mode", "prefill"], ("--disaggregation-mode is 'prefill'",)),
    "mixed chunk": (["--enable-mixed-chunk"], ("--enable-mixed-chunk is True", "it must be unset")),
    "hidden states": (["--enable-return-hidden-states"], ("--enable-return-hidden-states is True",)),
    "memory saver": (["--enable-memory-saver"], ("--enable-memory-saver is True",)),
    "window": (["--speculative-draft-window-size", "64"], ("--speculative-draft-window-size is 64",)),
    "backend": (["--attention-backend", "triton"], ("'triton'", "torch_native")),
    "steps": (["--speculative-num-steps", "7"], ("--speculative-num-steps is 7", "unset or 3")),
    "block too large": (
        ["--speculative-num-draft-tokens", "5"],
        ("--speculative-num-draft-tokens is 5", "allowed are 2 to 4"),
    ),
    "block of one": (["--speculative-num-draft-tokens", "1"], ("is 1", "allowed are 2 to 4")),
    "block of none": (["--speculative-num-draft-tokens", "0"], ("is 0", "allowed are 2 to 4")),
    "unknown mode": (["--d3d-mode", "fast"], ("--d3d-mode", "'fast'", "sync")),
    "unknown option": (["--d3d-modus", "sync"], ("--d3d-modus",)),
    "unknown device": (["--d3d-drafter-device", "gpu"], ("--d3d-drafter-device", "'gpu'", "cuda:N")),
}
ENVIRONMENT: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "unknown variable": (
        {"SGLANG_D3D_MODUS": "sync"},
        ("unknown D3D option SGLANG_D3D_MODUS", "SGLANG_D3D_MODE"),
    ),
    "bad variable": ({"SGLANG_D3D_MODE": "fast"}, ("SGLANG_D3D_MODE", "'fast'", "sync")),
    "simulated acceptance": ({"SGLANG_SIMULATE_ACC_LEN": "3"}, ("SGLANG_SIMULATE_ACC_LEN", "must be unset")),
}
DRAFTERS: dict[str, tuple[str, ...]] = {
    "missing": ("does not exist", "d3d init-drafter"),
    "classifier": ("architectures", "ForCausalLM"),
    "language model": ("has no d3d_config", "d3d init-drafter"),
    "other words": ("vocabular",),
    "truncated": ("model.safetensors",),
    "block of one": ("block_size", "1"),
    "mask is the end": ("mask_token_id", "eos"),
    "mask out of range": ("mask_token_id", "1000"),
    "unknown key": ("block_sice",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a good drafter and, by name, the drafters that must be refused."""
    folder = tmp_path_factory.mktemp("models")
    tiny.write_model(folder / "target")
    tiny.write_drafter(folder / "good")
    for name in DRAFTERS:
        if name != "missing":
            shutil.copytree(folder / "good", folder / name)
    tiny.edit_json(folder / "classifier" / "config.json", architectures=["LlamaForSequenceClassification"])
    tiny.edit_json(folder / "language model" / "config.json", d3d_config=None)
    tiny.write_tokenizer(folder / "other words", tokens=(*tiny.TOKENS[:-2], *reversed(tiny.TOKENS[-2:])))
    weights = folder / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    tiny.edit_d3d_config(folder / "block of one", block_size=1)
    tiny.edit_d3d_config(folder / "mask is the end", mask_token_id=tiny.EOS_ID)
    tiny.edit_d3d_config(folder / "mask out of range", mask_token_id=1000)
    tiny.edit_d3d_config(folder / "unknown key", block_sice=4)
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, str | None]:
    """How every start-up ends, by name."""
    base = ["--model-path", str(folder / "target"), *CPU_FLAGS]
    d3d = [*base, "--speculative-algorithm", "D3D", "--speculative-draft-model-path"]
    good = [*d3d, str(folder / "good")]
    starts: dict[str, Any] = {
        "good": {"args": good, "env": {}},
        "smaller block": {"args": [*good, "--speculative-num-draft-tokens", "2"], "env": {}},
        "no drafter": {"args": d3d[:-1], "env": {}},
        "flag without D3D": {"args": [*base, "--d3d-mode", "sync"], "env": {}},
    }
    starts |= {
        f"flag {name}": {"args": [*good, *args], "env": {}} for name, (args, _) in REFUSED_FLAGS.items()
    }
    starts |= {f"env {name}": {"args": good, "env": env} for name, (env, _) in ENVIRONMENT.items()}
    starts |= {f"drafter {name}": {"args": [*d3d, str(folder / name)], "env": {}} for name in DRAFTERS}
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.parse_arguments"],
        input=json.dumps(starts),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=server_environment(device="cpu"),
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ends: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return ends


def assert_refused(message: str | None, *parts: str) -> None:
    assert message is not None, "it was accepted"
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize("name", ["good", "smaller block"])
def test_good_arguments_pass(outcomes: dict[str, str | None], name: str) -> None:
    assert outcomes[name] is None


@pytest.mark.parametrize("name", REFUSED_FLAGS)
def test_refused_flags(outcomes: dict[str, str | None], name: str) -> None:
    assert_refused(outcomes[f"flag {name}"], *REFUSED_FLAGS[name][1])


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_refused_variables(outcomes: dict[str, str | None], name: str) -> None:
    assert_refused(outcomes[f"env {name}"], *ENVIRONMENT[name][1])


@pytest.mark.parametrize("name", DRAFTERS)
def test_refused_drafters(outcomes: dict[str, str | None], folder: Path, name: str) -> None:
    assert_refused(outcomes[f"drafter {name}"], str(folder / name), *DRAFTERS[name])


def test_a_drafter_must_be_given(outcomes: dict[str, str | None]) -> None:
    assert_refused(outcomes["no drafter"], "--speculative-draft-model-path is missing")


def test_our_flags_need_our_algorithm(outcomes: dict[str, str | None]) -> None:
    assert_refused(outcomes["flag without D3D"], "--d3d-mode", "--speculative-algorithm D3D")
