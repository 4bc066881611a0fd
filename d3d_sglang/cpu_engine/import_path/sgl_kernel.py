"""Stand-in for the compiled module `sgl_kernel` on a machine without a GPU.

Holds what SGLang's CPU engine calls, and names that it imports but cannot reach: they belong to SGLang's
own speculative algorithms, and calling one raises an error. Any other name is absent, as SGLang expects of a
build without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from d3d_sglang.cpu_engine.kernels import assign_req_to_token_pool_cpu, copy_all_layer_kv_cache_cpu

__all__ = ["assign_req_to_token_pool_cpu", "copy_all_layer_kv_cache_cpu"]

IMPORTED_ONLY = frozenset(
    {
        "assign_draft_cache_locs_contiguous_cpu",
        "assign_extend_cache_locs_cpu",
        "build_tree_kernel_efficient_cpu",
        "fill_accept_out_cache_loc_cpu",
        "fill_bonus_tokens_cpu",
        "verify_tree_greedy_cpu",
    }
)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name not in IMPORTED_ONLY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def unavailable(*_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"sgl_kernel.{name} was called, but it exists only in compiled builds of sgl_kernel: on a CPU "
            "without one, SGLang serves with D3D or without speculative decoding"
        )

    return unavailable
