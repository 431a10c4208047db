"""Weights on their way to a GPU, several at once.

A file's weights lie in the page cache. Copying them from there to the GPU takes one thread through pages
and through the driver's own small buffer; here some threads copy into pinned buffers of their own, out
of which the GPU reads at the bus's speed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import local

import torch
from torch import Tensor

_NUM_THREADS = 8
_BUFFER_BYTES = 32 << 20  # of a thread


def on_device[Key](items: Iterable[tuple[Key, Tensor]], device: torch.device) -> Iterator[tuple[Key, Tensor]]:
    """The same tensors on the device, in the same order. Those that follow are read and copied meanwhile."""
    if device.type != "cuda":
        for key, tensor in items:
            yield key, tensor.to(device)
        return
    copier = _Copier(torch.device("cuda", torch.cuda.current_device()))
    with ThreadPoolExecutor(_NUM_THREADS, "weights") as executor:
        pending: deque[tuple[Key, Future[Tensor]]] = deque()
        for key, tensor in items:
            pending.append((key, executor.submit(copier.copy, tensor)))
            if len(pending) > 2 * _NUM_THREADS:
                done_key, done = pending.popleft()
                yield done_key, done.result()
        for key, future in pending:
            yield key, future.result()


class _Copier:
    """Copies tensors to a CUDA device, for any number of threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_thread = local()

    def copy(self, tensor: Tensor) -> Tensor:
        """The tensor on the device; all of it is there on return."""
        with torch.cuda.device(self._device):
            out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            buffer, stream = self._own()
            stream.wait_stream(torch.cuda.current_stream())  # what used this memory before may still run
            source = tensor.contiguous().flatten().view(torch.uint8)
            target = out.flatten().view(torch.uint8)
            for start in range(0, len(source), _BUFFER_BYTES):
                part = source[start : start + _BUFFER_BYTES]
                stream.synchronize()  # the buffer is free
                buffer[: len(part)].copy_(part)
                with torch.cuda.stream(stream):
                    target[start : start + len(part)].copy_(buffer[: len(part)], non_blocking=True)
            stream.synchronize()
        return out

    def _own(self) -> tuple[Tensor, torch.cuda.Stream]:
        """The calling thread's buffer and stream."""
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
            self._of_thread.stream = torch.cuda.Stream()
        return self._of_thread.buffer, self._of_thread.stream
