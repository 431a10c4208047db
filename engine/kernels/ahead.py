"""Compile what some launches need, all at once, before any of them runs.

Triton compiles a kernel when it is launched first, one after the other. A model needs some dozens of
variants, each of which takes a core a second in LLVM and in ptxas, both outside Python's lock: threads
compile as many of them at once as there are cores, and kernels in CUDA C++ beside them (`cuda_source`).
Results go into Triton's own cache on disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import AsyncCompileMode, JITFunction

_pass: ContextVar[_Pass | None] = ContextVar("_pass", default=None)
_taken_up: set[Hashable] = set()  # in this process
_one_at_a_time = Lock()  # of engines that start in one process


def compile_ahead(launch: Callable[[], object]) -> int:
    """Compile every kernel that `launch()` would launch in this thread, and launch none of them: what they
    would have written is zero. Returns how many were not in this process yet."""
    with _one_at_a_time, ThreadPoolExecutor(os.cpu_count(), "compile") as executor:
        # A mode that raises where it ends would stay the active one for good.
        with (
            _ZeroedMemory(),
            _compiling_only(executor) as others,
            AsyncCompileMode(executor, ignore_errors=True) as mode,
        ):
            launch()
        for kernel in [*mode.future_kernels.values(), *others.compilations]:
            kernel.result()
        return len(mode.future_kernels) + len(others.compilations)


def is_taken_up(kernel: Hashable, compile_it: Callable[[], object]) -> bool:
    """Whether this thread only compiles, and must not launch: then `compile_it()` runs in another thread,
    once in a process for each `kernel`."""
    current = _pass.get()
    if current is None:
        return False
    if kernel not in _taken_up:
        _taken_up.add(kernel)
        current.compilations.append(current.executor.submit(compile_it))
    return True


@dataclass(frozen=True, slots=True)
class _Pass:
    """A thread that compiles only."""

    executor: ThreadPoolExecutor
    compilations: list[Future[object]]  # of kernels that are not Triton's


class _ZeroedMemory(TorchFunctionMode):
    """New tensors are zero, so that no op between two kernels sees an index from nowhere."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in _MAKE_EMPTY else out


_MAKE_EMPTY = (torch.empty, torch.empty_like, torch.Tensor.new_empty)


@contextmanager
def _compiling_only(executor: ThreadPoolExecutor) -> Iterator[_Pass]:
    """Launches of this thread become `JITFunction.warmup`, which has the same arguments."""
    run = JITFunction.run

    def compile_or_run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=warmup or _pass.get() is not None, **kwargs)

    current = _Pass(executor, [])
    token = _pass.set(current)
    JITFunction.run = compile_or_run
    try:
        yield current
    finally:
        JITFunction.run = run
        _pass.reset(token)
