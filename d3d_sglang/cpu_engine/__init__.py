"""What stock SGLang lacks to serve on a machine without a GPU, in one place; elsewhere it does nothing.

Two parts: a stand-in for the compiled module `sgl_kernel` (`install`), and attention for the verify step of
speculative decoding (`install_target_verify`). Both act only if SGLang's CPU engine is asked for
(SGLANG_USE_CPU_ENGINE=1) and no CUDA device is visible. Importing this imports neither torch nor sglang.
"""

from __future__ import annotations

from d3d_sglang.cpu_engine.standin import install, install_target_verify

__all__ = ["install", "install_target_verify"]
