"""Times of the training attention's Triton kernels with other tiles than the ones in `triton_tiles.py`.

One kernel at a time changes, the others keep theirs. A tile that does not fit is reported and passed over.
What wins here belongs into `default_tiles`. Print only: a choice of sizes is no result.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import torch
from triton.runtime.errors import OutOfResources

from bench.train_attention_cases import (
    QWEN3,
    SMOLLM2,
    Case,
    Setting,
    attention_inputs,
    milliseconds,
    shrunk,
    training_layout,
)
from train.attention.triton_forward import TritonPlan
from train.attention.triton_tiles import Tile, Tiles, default_tiles

CASES = (
    Case("layer", SMOLLM2, num_rows=16, context_len=1024, num_blocks=128),
    Case("layer", QWEN3, num_rows=8, context_len=2048, num_blocks=128),
)
CANDIDATES = {
    "forward": (
        Tile(q=64, kv=64, num_warps=4, num_stages=3),
        Tile(q=128, kv=32, num_warps=4, num_stages=3),
        Tile(q=128, kv=64, num_warps=4, num_stages=3),
        Tile(q=128, kv=64, num_warps=8, num_stages=3),
        Tile(q=128, kv=128, num_warps=8, num_stages=2),
    ),
    "dq": (
        Tile(q=64, kv=64, num_warps=4, num_stages=2),
        Tile(q=64, kv=64, num_warps=4, num_stages=3),
        Tile(q=128, kv=64, num_warps=8, num_stages=2),
        Tile(q=128, kv=64, num_warps=8, num_stages=3),
        Tile(q=128, kv=128, num_warps=8, num_stages=2),
    ),
    "dkdv": (
        Tile(q=64, kv=64, num_warps=4, num_stages=2),
        Tile(q=64, kv=64, num_warps=4, num_stages=3),
        Tile(q=32, kv=128, num_warps=8, num_stages=3),
        Tile(q=64, kv=128, num_warps=8, num_stages=2),
        Tile(q=64, kv=128, num_warps=8, num_stages=3),
        Tile(q=32, kv=64, num_warps=4, num_stages=3),
    ),
}


def sweep(case: Case, setting: Setting) -> None:
    """Print the time of every candidate for `case`, one line of JSON each, and the best of each kernel."""
    layout = training_layout(case, setting.device)
    head_dim = case.shape.head_dim
    query, key, value, grad_out = attention_inputs(case, setting, setting.dtype)
    query, key, value = (x.transpose(1, 2).contiguous() for x in (query, key, value))  # [N, W, heads, D]
    scaling = head_dim**-0.5
    usual = default_tiles(head_dim, setting.dtype)
    out, lse = TritonPlan.make(layout, head_dim=head_dim, dtype=setting.dtype).forward(
        query, key, value, scaling=scaling
    )

    def run(kernel: str, tiles: Tiles) -> float:
        plan = TritonPlan.make(layout, head_dim=head_dim, dtype=setting.dtype, tiles=tiles)

        def step() -> None:
            if kernel == "forward":
                plan.forward(query, key, value, scaling=scaling)
            else:
                plan.backward.gradients(
                    query, key, value, out=out, lse=lse, grad_out=grad_out, scaling=scaling
                )

        step()  # compiles
        return milliseconds(step, setting, seconds=setting.seconds)

    for kernel, candidates in CANDIDATES.items():
        times = {}
        for tile in candidates:
            line = {"case": case.name, "kernel": kernel, "tile": vars(tile)}
            try:
                times[tile] = run(kernel, replace(usual, **{kernel: tile}))
            except OutOfResources as error:
                print(json.dumps(line | {"refused": str(error)}), flush=True)
                continue
            what = "forward" if kernel == "forward" else "dq and dkdv"
            print(json.dumps(line | {f"{what} ms": round(times[tile], 4)}), flush=True)
        best = min(times, key=lambda tile: times[tile])
        print(f"{case.name} {kernel}: best {best}, in use {getattr(usual, kernel)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time tiles of the Triton kernels; see the module's text.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=0.3, help="length of each measurement (default 0.3)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to rehearse")
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    setting = Setting(device, dtype, ("triton",), repeats=1, seconds=args.seconds)
    if args.quick:
        setting = replace(setting, seconds=0.01, steps_per_wait=1)
    for case in CASES:
        if args.cases in case.name:
            sweep(shrunk(case) if args.quick else case, setting)


if __name__ == "__main__":
    main()
