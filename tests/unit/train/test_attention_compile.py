"""The Triton kernels of training attention compile for a Hopper GPU, on whatever machine this is.

The interpreter runs them, but knows nothing of shared memory, registers and what Triton refuses to compile.
"""

from __future__ import annotations

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.runtime.jit import JITFunction

from train.attention.triton_backward import _dkdv_kernel, _dq_kernel
from train.attention.triton_forward import _forward_kernel
from train.attention.triton_tiles import Tile, default_tiles

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY_LIMIT = 227 * 1024  # bytes a block may use
FP32, INT32 = "lse delta", "ctx lo hi ranges num_full full num_partial partial"


def compile_for_hopper(kernel: JITFunction, tile: Tile, *, head_dim: int) -> tuple[str, int]:
    """PTX, and the bytes of shared memory of a block."""
    constants = {"num_heads": 4, "group": 2, "head_dim": head_dim, "precision": "tf32"}
    constants |= {"block_q": tile.q, "block_kv": tile.kv}
    signature = {}
    for param in kernel.params:
        name = param.name.removesuffix("_ptr")
        if param.name in constants:
            signature[param.name] = "constexpr"
        elif param.name.endswith("_ptr"):
            signature[name + "_ptr"] = (
                "*fp32" if name in FP32.split() else "*i32" if name in INT32.split() else "*bf16"
            )
        else:
            signature[name] = "fp32" if name.startswith("scale") else "i32"
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind.startswith("*") or kind == "i32"
    }
    source = ASTSource(
        kernel, signature, {(list(signature).index(k),): v for k, v in constants.items()}, aligned
    )
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    compiled = compile_kernel(source, target=HOPPER, options=options)
    return compiled.asm["ptx"], compiled.metadata.shared


@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_compile(head_dim: int) -> None:
    tiles = default_tiles(head_dim, torch.bfloat16)
    for kernel, tile in (
        (_forward_kernel, tiles.forward),
        (_dq_kernel, tiles.dq),
        (_dkdv_kernel, tiles.dkdv),
    ):
        ptx, shared = compile_for_hopper(kernel, tile, head_dim=head_dim)
        assert shared <= SHARED_MEMORY_LIMIT, kernel
        assert "wgmma.mma_async" in ptx, f"{kernel} does not use Hopper's tensor cores"
        assert "cp.async.cg" in ptx, f"{kernel} does not load ahead"
