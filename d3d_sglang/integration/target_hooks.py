"""Changes inside SGLang without which its target cannot verify for a plugin algorithm.

Graph capture and warm-up ask for the verify input of the running algorithm and get None for one they do not
know, while capturing the verify shape all the same. Both places are given ours, for D3D only. And at page
size 1 a row of SGLang's slot table is shorter than what a decode round reserves near the context's end (2 B
slots past the committed ones against B + 4), so a request there would write past its row. The worker
installs all of it in the scheduler process before pools are sized: nothing else sees it.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache import allocation_sizing, kv_cache_configurator
from sglang.srt.model_executor.runner import base_runner, decode_cuda_graph_runner
from sglang.srt.speculative.spec_info import SpecInput

from d3d_sglang.integration.spec_input import verify_input


def install(*, block_size: int) -> None:
    """Make warm-up and graph capture use D3D's verify input of `block_size` tokens, and widen slot rows."""
    capture = decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info
    dummy = base_runner.create_dummy_verify_input

    def get_spec_info(self: Any, num_tokens: int) -> SpecInput | None:
        if _is_d3d(self.model_runner.spec_algorithm):
            return verify_input(block=None, positions=None, block_size=block_size)
        return capture(self, num_tokens)

    def create_dummy_verify_input(spec_algorithm: Any, *args: Any, **kwargs: Any) -> SpecInput | None:
        if _is_d3d(spec_algorithm):
            return verify_input(block=None, positions=None, block_size=block_size)
        return dummy(spec_algorithm, *args, **kwargs)

    extra_context = allocation_sizing.get_req_to_token_extra_context_len

    def get_req_to_token_extra_context_len() -> int:
        return int(max(extra_context(), allocation_sizing.get_alloc_reserve_per_decode()))

    kv_cache_configurator.get_req_to_token_extra_context_len = get_req_to_token_extra_context_len
    decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info = get_spec_info
    base_runner.create_dummy_verify_input = create_dummy_verify_input


def _is_d3d(algorithm: Any) -> bool:
    return getattr(algorithm, "name", None) == "D3D"
