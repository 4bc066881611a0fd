"""The ranks of a run: who this process is, joining the others, and agreeing with them.

Owns the environment that launchers leave (`deepspeed`, `torchrun`, or nothing at all for one rank), the
choice of DeepSpeed's device, and the few collectives that the loop needs outside the engine.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch

from train.errors import TrainingError

Gathered = TypeVar("Gathered")
SHARED_MEMORY_OP = "deepspeed_shm_comm"
JOIN_TIMEOUT = timedelta(minutes=30)  # rank 0 checks and writes exports while the others wait


@dataclass(frozen=True)
class World:
    """This process among the others. `rank` counts over all machines, `local_rank` within this one."""

    rank: int
    size: int
    local_rank: int

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and talks."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The accelerator of this rank, or the CPU."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")


def read_world(*, local_rank: int | None = None) -> World:
    """Read the launcher's environment; without one this is the only rank, and the environment says so then.

    To be called before DeepSpeed is imported, which transformers may do: that is when it picks its device.

    Args:
        local_rank: from the command line, as the DeepSpeed launcher passes it.

    Raises:
        ValueError: the environment is incomplete, or names a GPU this machine does not have.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    given = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if not any(given.values()):
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone, MASTER_PORT=str(_free_port()))
        return World(rank=0, size=1, local_rank=0)
    if given["LOCAL_RANK"] is None and local_rank is not None:
        given["LOCAL_RANK"] = os.environ["LOCAL_RANK"] = str(local_rank)
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ValueError(
            f"the environment has {', '.join(given.keys() - set(missing))} but not {', '.join(missing)}: "
            "start with deepspeed, torchrun, or plain python with none of them set"
        )
    rank, size, local = (int(str(value)) for value in given.values())
    if torch.cuda.is_available() and local >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local} has no GPU, this machine shows {torch.cuda.device_count()}: start as many "
            "processes as there are GPUs"
        )
    return World(rank=rank, size=size, local_rank=local)


def join(world: World, *, log: Path) -> None:
    """Form the process group. What DeepSpeed and its parts have to say goes to `log`, errors aside."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    import deepspeed
    from deepspeed.utils import logger

    handler = logging.FileHandler(log, encoding="utf-8")
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {world.rank} %(levelname)s %(message)s"))
    logger.handlers[:] = [handler]
    # Only tensor-parallel inference uses it, and building it at the first start takes a minute, a compiler,
    # ninja and Python's headers.
    deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False
    deepspeed.init_distributed(verbose=False, timeout=JOIN_TIMEOUT)


def leave() -> None:
    """Dissolve the process group, if there is one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def sum_over_ranks(values: torch.Tensor) -> list[float]:
    """Element-wise sum over all ranks, in place, read on the host."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(values)
    return [float(value) for value in values.tolist()]


def barrier() -> None:
    """Wait for all ranks."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def gather_objects(own: Gathered) -> list[Gathered]:
    """All ranks' objects, in the order of the ranks. Pickles them: for what happens rarely."""
    if not torch.distributed.is_initialized():
        return [own]
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, own)
    return gathered


def raise_together(error: Exception | None, *, device: torch.device) -> None:
    """Raise on every rank if any rank has an error: its own, or one that says where to look.

    Raises:
        TrainingError: another rank failed.
        Exception: `error` itself.
    """
    failed = sum_over_ranks(torch.tensor([float(error is not None)], dtype=torch.float64, device=device))
    if error is not None:
        raise error
    if failed[0]:
        raise TrainingError(f"{int(failed[0])} other rank(s) failed, their message says why")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
