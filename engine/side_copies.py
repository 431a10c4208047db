"""Small copies between host and device that do not stand between two steps.

In a step's own stream a copy of some bytes costs 5 to 10 µs: the device's kernels wait for its copy engine,
and that for them. So these go through streams of their own, up before the step in front has ended and down
while the next one runs. On other devices than CUDA nothing is copied.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def upload(host: Tensor, device: torch.device) -> Tensor:
    """A tensor in pinned memory on the device, for what is launched from here on in the current stream."""
    if device.type != "cuda":
        return host
    current, beside = torch.cuda.current_stream(device), _stream(device, "up")
    with torch.cuda.stream(beside):
        there = host.to(device, non_blocking=True)
    current.wait_stream(beside)
    there.record_stream(current)
    return there


class Download:
    """A tensor on its way to the host: as it is in the current stream now."""

    def __init__(self, source: Tensor) -> None:
        self._host = source
        self._is_there: torch.cuda.Event | None = None
        if source.is_cuda:
            beside = _stream(source.device, "down")
            beside.wait_stream(torch.cuda.current_stream(source.device))
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            with torch.cuda.stream(beside):
                self._host.copy_(source, non_blocking=True)
                # An event of its own: what is launched from here on is not waited for.
                self._is_there = torch.cuda.Event()
                self._is_there.record()
            source.record_stream(beside)

    def read(self) -> Tensor:
        """Wait for the tensor."""
        if self._is_there is not None:
            self._is_there.synchronize()
        return self._host


@functools.cache
def _stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    """`direction`: one does not wait for what goes the other way."""
    return torch.cuda.Stream(device)
