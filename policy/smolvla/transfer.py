"""Copies to a device and back that do not wait for what it still has to do.

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


class ReadBack:
    """A tensor on its way to the CPU: behind what has been launched so far, and before what comes."""

    def __init__(self, x: Tensor) -> None:
        self._host, self._is_there = x, None
        if x.is_cuda:
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._host.copy_(x, non_blocking=True)
            self._is_there = torch.cuda.Event()
            self._is_there.record()

    def is_done(self) -> bool:
        """`read` would not wait."""
        return self._is_there is None or self._is_there.query()

    def read(self) -> Tensor:
        """The tensor, on the CPU."""
        if self._is_there is not None:
            self._is_there.synchronize()
        return self._host
