"""Sizes of the Triton kernels' tiles, and what their launches share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

HEAD_DIMS = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """One kernel: `q` queries by `kv` keys a step, its warps and the depth of its pipeline of loads."""

    q: int
    kv: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments of the kernel's launch."""
        return {
            "block_q": self.q,
            "block_kv": self.kv,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


@dataclass(frozen=True)
class Tiles:
    """The three kernels of one head size and type."""

    forward: Tile
    dq: Tile
    dkdv: Tile


def default_tiles(head_dim: int, dtype: torch.dtype) -> Tiles:
    """Sizes for a Hopper GPU; `bench.train_attention --sweep` measures others.

    Raises:
        ValueError: there is no kernel for the head size or the type.
    """
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim {head_dim} has no Triton kernel; it may be one of {HEAD_DIMS}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype} has no Triton kernel; it may be one of {DTYPES}")
    if dtype == torch.float32:  # without tensor cores: exact, slow, for tests
        small = Tile(q=32, kv=32, num_warps=4, num_stages=1)
        return Tiles(forward=small, dq=small, dkdv=small)
    if head_dim <= 64:
        return Tiles(
            forward=Tile(q=128, kv=64, num_warps=4, num_stages=3),
            dq=Tile(q=128, kv=64, num_warps=8, num_stages=3),
            dkdv=Tile(q=64, kv=128, num_warps=8, num_stages=3),
        )
    return Tiles(
        forward=Tile(q=128, kv=64, num_warps=8, num_stages=3),
        dq=Tile(q=128, kv=64, num_warps=8, num_stages=3),
        dkdv=Tile(q=64, kv=128, num_warps=8, num_stages=2),
    )


def dot_precision(dtype: torch.dtype) -> str:
    """Triton's `input_precision`: fp32 is meant to be fp32, not TF32. Without effect on 16-bit types."""
    return "ieee" if dtype == torch.float32 else "tf32"
