"""Decides whether the CPU engine needs help, and puts the help in place.

The published `sgl_kernel` wheel is for CUDA: without a driver its import fails, and SGLang's CPU engine
imports it by name. A stand-in on the import path answers instead. The path, not `sys.modules`: SGLang spawns
its scheduler, and a spawned process takes over the parent's path but imports `sgl_kernel` along with its
entry function, before any plugin is loaded there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ENABLE_ENV = "SGLANG_USE_CPU_ENGINE"  # SGLang's own switch
IMPORT_PATH = str(Path(__file__).parent / "import_path")


def is_needed() -> bool:
    """Whether SGLang's CPU engine is asked for and this is a machine where it cannot start by itself."""
    if os.environ.get(ENABLE_ENV, "0") != "1":
        return False
    import torch  # slow to import, and of no use where another engine is asked for

    return not torch.cuda.is_available()


def install() -> None:
    """Let `import sgl_kernel` find the stand-in, here and in processes spawned from here.

    Does nothing where `is_needed` says no, where a CPU build of the real module is installed, and when called
    again. Call it before the first import of a module of SGLang's model runner.
    """
    if IMPORT_PATH in sys.path or not is_needed() or _has_cpu_build():
        return
    sys.path.insert(0, IMPORT_PATH)
    importlib.invalidate_caches()


def install_target_verify() -> None:
    """Give the attention backend `torch_native` the verify step; call before the backend is made."""
    if not is_needed():
        return
    # Imports SGLang's model runner: for the scheduler process alone.
    from d3d_sglang.cpu_engine import torch_native

    torch_native.install()


def _has_cpu_build() -> bool:
    """Whether the installed `sgl_kernel` is a CPU build: CUDA builds have their operators a folder deeper."""
    spec = importlib.util.find_spec("sgl_kernel")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    return any(list(Path(folder).glob("common_ops.*")) for folder in folders)
