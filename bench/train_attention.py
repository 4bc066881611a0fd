"""Speed of the training attentions on one GPU, forward and backward, after a check of their gradients.

Packed rows as training makes them: S context tokens (prompts of a quarter, answers of different length), K
blocks of 16 at sorted anchors. Two kinds of cases:

- `layer`: attention alone, from query, key and value to their gradients.
- `stack`: a decoder of SmolLM2-135M's shape (random weights, no embedding, no head) from inputs to gradients.

The implementations take turns, `--repeats` times for at least `--seconds` each, so that a clock that drifts
drifts for all. Gradients are compared with float64 first: a wrong kernel stops the run before it is timed.
Plans are made outside the timed part and timed on their own: training makes one a micro-batch.

`--device cpu --quick` rehearses all code paths in seconds, with TRITON_INTERPRET=1 the Triton kernels too.
Its result goes to build/.

Legend: N rows, S context tokens, K blocks of B, W = S + K * B, H query heads, G K/V heads, D head size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaModel

from bench.result import ROOT, make_result, write_result
from bench.train_attention_cases import (
    BLOCK_SIZE,
    QWEN3,
    SMOLLM2,
    Case,
    Setting,
    Shape,
    attention_inputs,
    differentiate,
    milliseconds,
    real_tokens,
    shrunk,
    training_layout,
    visible_pairs,
)
from d3d_sglang.layout import PackedLayout
from train.attention import ATTENTION_NAMES, AttentionName, AttentionPlan, implementation, register

# Largest difference from float64 over the largest value: bf16 rounds inputs of each product to 4e-3.
MAX_ERROR = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
BACKWARD_FLOPS = 2.5  # matrix products of an attention backward, in forwards


CASES = (
    Case("layer", SMOLLM2, num_rows=16, context_len=1024, num_blocks=128),
    Case("layer", SMOLLM2, num_rows=16, context_len=2048, num_blocks=128),
    Case("layer", QWEN3, num_rows=8, context_len=1024, num_blocks=128),
    Case("layer", QWEN3, num_rows=8, context_len=2048, num_blocks=128),
    Case("stack", SMOLLM2, num_rows=8, context_len=1024, num_blocks=128),
    Case("stack", SMOLLM2, num_rows=8, context_len=2048, num_blocks=128),
)


def gradient_errors(shape: Shape, setting: Setting) -> dict[str, dict[str, float]]:
    """Largest error of out, dq, dk and dv of each implementation, relative to the largest value in float64.

    Raises:
        SystemExit: one is too large. Nothing is worth timing then.
    """
    case = Case("check", shape, num_rows=2, context_len=320, num_blocks=24)
    if setting.device.type == "cpu":
        case = replace(case, context_len=48, num_blocks=3)
    layout = training_layout(case, setting.device)
    inputs = attention_inputs(case, setting, setting.dtype)
    exact = replace(setting, dtype=torch.float64).plan("sdpa", case, layout)
    expected = differentiate(exact, [x.double() for x in inputs])
    errors = {}
    for name in setting.names:
        found = differentiate(setting.plan(name, case, layout), inputs)
        errors[name] = {
            part: float((x.double() - y).abs().max() / y.abs().max())
            for part, x, y in zip(("out", "dq", "dk", "dv"), found, expected, strict=True)
        }
        print(f"{shape.name:10} {name:10}", *(f"{k} {v:.1e}" for k, v in errors[name].items()), flush=True)
        # Not a number is no less than anything.
        if not all(error <= MAX_ERROR[setting.dtype] for error in errors[name].values()):
            raise SystemExit(f"gradients of {name} are wrong, more than {MAX_ERROR[setting.dtype]}")
    return errors


def layer_steps(case: Case, setting: Setting, layout: PackedLayout) -> dict[str, Callable[[], Any]]:
    """A forward and backward of attention alone, by implementation."""
    inputs = attention_inputs(case, setting, setting.dtype)

    def step_of(plan: AttentionPlan) -> Callable[[], Any]:
        return lambda: differentiate(plan, inputs)

    return {name: step_of(setting.plan(name, case, layout)) for name in setting.names}


def stack_steps(case: Case, setting: Setting, layout: PackedLayout) -> dict[str, Callable[[], Any]]:
    """A forward and backward of a model without embedding and head, by implementation."""
    shape = case.shape
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=case.context_len + BLOCK_SIZE,
    )
    torch.manual_seed(0)
    model = LlamaModel(config).to(setting.device, setting.dtype).train()
    size = (case.num_rows, layout.num_window, shape.hidden_size)
    hidden, grad = torch.randn(2, *size, device=setting.device, dtype=setting.dtype)

    def step_of(name: AttentionName, plan: AttentionPlan) -> Callable[[], Any]:
        def step() -> None:
            model.set_attn_implementation(implementation(name))
            out = model(
                inputs_embeds=hidden,
                position_ids=layout.position_ids,
                attention_plan=plan,
                use_cache=False,
            ).last_hidden_state
            out.backward(grad)
            model.zero_grad(set_to_none=True)

        return step

    return {name: step_of(name, setting.plan(name, case, layout)) for name in setting.names}


def measure(case: Case, setting: Setting) -> Iterator[dict[str, Any]]:
    """Runs of a case, implementations in turn: `{"case", "name", "repeat", "ms", ...}`."""
    # After shapes of another case torch would compile FlexAttention for shapes that vary, which is slower.
    torch.compiler.reset()
    layout = training_layout(case, setting.device)
    steps = (layer_steps if case.kind == "layer" else stack_steps)(case, setting, layout)
    for step in steps.values():  # compiles
        for _ in range(setting.steps_per_wait):
            step()
    for repeat in range(setting.repeats):
        for name, step in steps.items():
            ms = milliseconds(step, setting, seconds=setting.seconds)
            yield {"case": case.name, "name": name, "repeat": repeat, "ms": round(ms, 4)}
    for name in setting.names:
        ms = milliseconds(lambda name=name: setting.plan(name, case, layout), setting, seconds=0.2)  # type: ignore[misc]
        yield {"case": case.name, "name": name, "plan_ms": round(ms, 4)}


def metrics_of(
    runs: Sequence[dict[str, Any]], cases: Sequence[Case], device: torch.device
) -> dict[str, float]:
    """Medians by case and implementation, throughput of real tokens, and speed against SDPA and Flex."""
    metrics: dict[str, float] = {}
    for case in cases:
        layout = training_layout(case, device)
        num_real = int(real_tokens(layout).sum())
        flops = 4 * visible_pairs(layout) * case.shape.num_heads * case.shape.head_dim * (1 + BACKWARD_FLOPS)
        medians = {}
        for name in dict.fromkeys(run["name"] for run in runs):
            of_name = [run for run in runs if run["case"] == case.name and run["name"] == name]
            medians[name] = statistics.median(run["ms"] for run in of_name if "ms" in run)
            prefix = f"{case.name}_{name}"
            metrics[f"{prefix}_ms"] = round(medians[name], 4)
            metrics[f"{prefix}_plan_ms"] = next(run["plan_ms"] for run in of_name if "plan_ms" in run)
            metrics[f"{prefix}_tokens_per_s"] = round(num_real / medians[name] * 1e3)
            if case.kind == "layer":
                metrics[f"{prefix}_tflops"] = round(flops / medians[name] / 1e9, 2)
        for base in ("sdpa", "flex"):
            if base in medians:
                metrics |= {
                    f"{case.name}_{name}_speed_vs_{base}": round(medians[base] / ms, 3)
                    for name, ms in medians.items()
                    if name != base
                }
    return metrics


def print_table(metrics: dict[str, float], cases: Sequence[Case], names: Sequence[str]) -> None:
    """One line a case and implementation."""
    print(
        f"{'case':32} {'attention':10} {'ms':>9} {'tokens/s':>11} {'TFLOP/s':>8} {'/sdpa':>6} {'/flex':>6} "
        f"{'plan ms':>8}"
    )
    for case in cases:
        for name in names:
            prefix = f"{case.name}_{name}_"
            columns = [
                f"{metrics.get(prefix + key, float('nan')):{width}}"
                for key, width in (
                    ("ms", "9.3f"),
                    ("tokens_per_s", "11.0f"),
                    ("tflops", "8.1f"),
                    ("speed_vs_sdpa", "6.2f"),
                    ("speed_vs_flex", "6.2f"),
                    ("plan_ms", "8.2f"),
                )
            ]
            print(f"{case.name:32} {name:10}", *columns)


def available(names: Sequence[AttentionName], device: torch.device) -> tuple[AttentionName, ...]:
    """Those of `names` that can train on the device; says which cannot."""
    if device.type == "cuda":
        return tuple(names)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    can = {"sdpa", "triton"} if interpreted else {"sdpa"}
    for name in names:
        if name not in can:
            hint = " without TRITON_INTERPRET=1" if name == "triton" else ""
            print(f"{name} does not train on a CPU{hint}: skipped")
    return tuple(name for name in names if name in can)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the training attentions; see the module's text.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=ATTENTION_NAMES, default=ATTENTION_NAMES, metavar="NAME")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=3, help="turns of every implementation (default 3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="least length of a turn (default 2)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and turns, to rehearse")
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    setting = Setting(device, dtype, available(args.only, device), args.repeats, args.seconds)
    cases = [case for case in CASES if args.cases in case.name]
    if args.quick:
        setting = replace(setting, seconds=0.01, steps_per_wait=1)
        cases = [shrunk(case) for case in cases]
    if not cases or not setting.names:
        raise SystemExit("nothing to measure")
    register()
    shapes = dict.fromkeys(case.shape for case in cases)
    errors = {shape.name: gradient_errors(shape, setting) for shape in shapes}
    runs = []
    for case in cases:
        for run in measure(case, setting):
            runs.append(run)
            print(json.dumps(run), flush=True)
    metrics = metrics_of(runs, cases, device)
    metrics |= {
        f"max_error_{shape}_{name}": max(parts.values())
        for shape, by_name in errors.items()
        for name, parts in by_name.items()
    }
    settings = {
        "dtype": str(dtype),
        "block_size": BLOCK_SIZE,
        "repeats": setting.repeats,
        "seconds": setting.seconds,
        "cases": [asdict(case) for case in cases],
        "errors": errors,
    }
    result = make_result("train_attention", runs=runs, metrics=metrics, settings=settings)
    print_table(metrics, cases, setting.names)
    print(f"wrote {write_result(result, ROOT / 'build' if args.quick else ROOT)}")
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
