"""The group of processes that a model is spread over, as torch.distributed knows it."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented as public

_HOST = "127.0.0.1"
# Who does not answer is found by `Workers`, long before this.
_TIMEOUT = timedelta(hours=1)


def open_store() -> TCPStore:
    """Where the processes find each other, on a free port of this host."""
    return TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)


def find_store(port: int) -> TCPStore:
    """The store that rank 0 has opened."""
    return TCPStore(_HOST, port, is_master=False)


def join_group(store: TCPStore, rank: int, size: int, device: torch.device) -> None:
    """Join; returns when all have. NCCL on CUDA, gloo on a CPU."""
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
        device_id=torch.device("cuda", torch.cuda.current_device()) if is_cuda else None,
    )
