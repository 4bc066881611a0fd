"""D3D as SGLang sees an algorithm: its registration, its predicates, and what the registry leaves out."""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from d3d_sglang.integration import server_args as arguments

NAME = "D3D"


class D3DAlgorithm(CustomSpecAlgo):
    """Every `is_*` stays False, so no branch made for another algorithm is taken.

    The last three methods are called on every algorithm but missing from SGLang's base class.
    """

    def supports_grammar_overlap(self) -> bool:
        return True

    def handle_server_args(self, server_args: Any) -> None:
        arguments.settle(server_args)

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap  # circular at import time

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False


def register() -> None:
    """Register D3D with SGLang; safe to call again in one process."""
    if get_spec(NAME) is not None:
        return

    @SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, validate_server_args=arguments.validate, spec_class=D3DAlgorithm
    )
    def make_worker(_server_args: Any) -> type:
        from d3d_sglang.worker import D3DWorker  # heavy, and wanted in the scheduler process alone

        return D3DWorker
