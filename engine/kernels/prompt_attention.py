"""Attention of prompts that begin in this step: nothing is read from the pool.

cuDNN through torch on CUDA, where it reached 606-627 TFLOP/s for prompts of 9,000 tokens and more on an
H200 (torch's flash kernel 320-348); torch's own kernel on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_CUDA_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
_choosing = Lock()  # what torch may choose from is the process's

_Layout = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides


class PromptPlanner:
    """A thread in which prompts attend that are to be captured.

    cuDNN makes a plan for each length, in 40 to 60 ms outside Python's lock, and torch keeps plans by thread.
    So this one makes them while others do something else, and captures with them. It lives as long as the
    graphs, whose kernels its plans own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._executor = ThreadPoolExecutor(1, "dayshift-prompts", torch.cuda.set_device, (device,))
        self._plans: list[Future[None]] = []
        self._known: set[tuple[tuple[_Layout, ...], torch.dtype, float]] = set()

    @contextmanager
    def attends(self) -> Iterator[None]:
        """In this context, of the calling thread, a prompt's attention is nothing but planned, and zero."""
        token = _planner.set(self)
        try:
            yield
        finally:
            _planner.reset(token)

    def run[T](self, call: Callable[[], T]) -> T:
        """Call in the thread, after all plans are made, and wait. Raises what a plan or the call raised."""
        for plan in self._plans:
            plan.result()
        return self._executor.submit(call).result()

    def plan(self, parts: tuple[torch.Tensor, ...], scale: float) -> None:
        """Attend in the thread, soon, to others of the same layout."""
        dtype = parts[0].dtype
        layouts = tuple((tuple(part.shape), part.stride()) for part in parts)
        if (layouts, dtype, scale) not in self._known:
            self._known.add((layouts, dtype, scale))
            self._plans.append(self._executor.submit(self._attend, layouts, dtype, scale))

    @torch.inference_mode()
    def _attend(self, layouts: tuple[_Layout, ...], dtype: torch.dtype, scale: float) -> None:
        q, k, v = (torch.empty_strided(*layout, dtype=dtype, device=self._device) for layout in layouts)
        _attend_on_cuda(q, k, v, scale)


_planner: ContextVar[PromptPlanner | None] = ContextVar("_planner", default=None)


def prompt_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], scale: float
) -> torch.Tensor:
    """Causal grouped-query attention of whole prompts, each within itself.

    Args:
        q: (num_tokens, heads, head_dim), rotated; the prompts in a row.
        k, v: (num_tokens, kv_heads, head_dim), k rotated.
        lengths: tokens of each prompt; together num_tokens.
        scale: factor of the scores.

    Returns:
        (num_tokens, heads, head_dim), q's dtype.
    """
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    outs = [_attend(*part, scale) for part in parts]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    if not q.is_cuda:
        return _attend_by_torch(q, k, v, scale)
    if (planner := _planner.get()) is not None:
        planner.plan((q, k, v), scale)
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    return _attend_on_cuda(q, k, v, scale)


def _attend_on_cuda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    with _choosing, sdpa_kernel(_CUDA_BACKENDS, set_priority=True):
        return _attend_by_torch(q, k, v, scale)


def _attend_by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # (1, heads, num_tokens, head_dim)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
