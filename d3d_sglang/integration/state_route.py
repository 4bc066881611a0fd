"""`GET /d3d/state`: rounds, accept lengths and effective options of a running server, as JSON.

The counts are the worker's, in the scheduler process; they travel with SGLang's own internal state, under the
key STATE_KEY, and the route picks them out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

STATE_KEY = "d3d"


def install() -> None:
    """Add the route to SGLang's HTTP application (the serving process)."""
    from sglang.srt.entrypoints import http_server  # the serving process loads it anyway, others must not

    async def state() -> dict[str, Any]:
        states = await http_server.get_global_state().tokenizer_manager.get_internal_state()
        return {"workers": [internal[STATE_KEY] for internal in states]}

    http_server.app.add_api_route("/d3d/state", state, methods=["GET"], tags=["d3d"])


def publish(state: Callable[[], dict[str, Any]]) -> None:
    """Let the scheduler's internal state carry what `state()` returns (the scheduler process)."""
    from sglang.srt.managers.scheduler_components.internal_state import (
        SchedulerInternalStateController as Controller,
    )

    add_speculative = Controller._add_speculative

    def add_with_d3d(self: Any, internal: dict[str, Any]) -> None:
        add_speculative(self, internal)
        internal[STATE_KEY] = state()

    Controller._add_speculative = add_with_d3d
