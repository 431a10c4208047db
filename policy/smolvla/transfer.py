"""Copies to a device that do not wait for what it still has to do.

A copy from ordinary memory waits for everything that was launched before, planner tokens too; one from pinned
memory only joins the queue. torch's allocator keeps the pinned memory until the copy has been done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`; the same one if that is the CPU."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def stack_on(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """`torch.stack` of CPU tensors, on `device`."""
    if device.type != "cuda":
        return torch.stack(list(rows)).to(device)
    pinned = torch.empty((len(rows), *rows[0].shape), dtype=rows[0].dtype, pin_memory=True)
    return torch.stack(list(rows), out=pinned).to(device, non_blocking=True)
