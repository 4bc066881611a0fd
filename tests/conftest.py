"""What holds for all tests: no network, no GPU tests without a GPU, and the same examples on every CI run."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Before anything imports transformers: a test that reaches for a model hub is a mistake and fails at once.
os.environ["HF_HUB_OFFLINE"] = "1"

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU. torch is imported only if there are any."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
