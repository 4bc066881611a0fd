"""Entry point of the plugin: SGLang calls `register` in each of its processes.

Light on purpose: the worker, the drafter and their libraries are imported in the scheduler process alone. An
exception here is only logged by SGLang, which then does not know the algorithm; `d3d doctor` shows it.
"""

from __future__ import annotations

from d3d_sglang import cpu_engine


def register() -> None:
    """Make D3D known to SGLang; safe to call again in one process."""
    cpu_engine.install()
    # Imports SGLang, which on a machine without a GPU needs the line above first.
    from d3d_sglang.integration import algorithm, cli_flags

    algorithm.register()
    cli_flags.install()
