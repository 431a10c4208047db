"""Compile what some launches need, all at once, before any of them runs.

Triton compiles a kernel when it is launched first, one after the other. A model needs some dozens of
variants, each of which takes a core a second in LLVM and in ptxas, both outside Python's lock: threads
compile as many of them at once as there are cores, and kernels in CUDA C++ beside them (`cuda_source`).
Results go into Triton's own cache on disk.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from triton import AsyncCompileMode, JITFunction

_pass: ContextVar[_Pass | None] = ContextVar("_pass", default=None)
_taken_up: set[Hashable] = set()  # in this process
_one_at_a_time = Lock()  # of engines that start in one process


def compile_ahead(launch: Callable[[], object]) -> int:
    """Compile every kernel that `launch()` would launch in this thread, and launch none of them: what they
    would have written is zero. Returns how many were not in this process yet."""
    with _one_at_a_time, ThreadPoolExecutor(os.cpu_count(), "compile", *_on_this_gpu()) as executor:
        # A mode that raises where it ends would stay the active one for good.
        with _compiling_only(executor) as others, _Compilations(executor, ignore_errors=True) as mode:
            launch()
        for kernel in [*mode.future_kernels.values(), *others.compilations]:
            kernel.result()
        return len(mode.future_kernels) + len(others.compilations)


def _on_this_gpu() -> tuple[Any, ...]:
    """What a thread begins with, so that it loads kernels where this one would."""
    return (torch.cuda.set_device, (torch.cuda.current_device(),)) if torch.cuda.is_initialized() else ()


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


class _Compilations(AsyncCompileMode):
    """Kernels on their way. Triton asks for one at each of its launches until it has it, and makes its key
    for the cache on disk each time, five times the work of a launch: it gets it as soon as it is there.

    Their threads load them, too: for that a C compiler makes a function that launches kernels with such
    arguments, in 0.3 s, unless it is in the cache, where the next kernel with such arguments finds it."""

    def __init__(self, executor: ThreadPoolExecutor, *, ignore_errors: bool) -> None:
        super().__init__(executor, ignore_errors=ignore_errors)
        self._loading: dict[str, Lock] = {}  # by the types of arguments

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], Any]) -> Any:
        def compile_and_load() -> Any:
            made = compile_fn()
            types = str([*made.src.signature.values()])
            with self._loading.setdefault(types, Lock()):
                _ = made.run
            return made

        kernel = super().submit(key, compile_and_load, finalize_fn)
        if kernel.future.done():
            kernel.result(self.ignore_errors)
        return kernel


@contextmanager
def _compiling_only(executor: ThreadPoolExecutor) -> Iterator[_Pass]:
    """Launches of this thread become `JITFunction.warmup`, which has the same arguments. Its new tensors are
    zero, so that no op between two kernels sees an index from nowhere."""
    run = JITFunction.run

    def compile_or_run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=warmup or _pass.get() is not None, **kwargs)

    current = _Pass(executor, [])
    token = _pass.set(current)
    JITFunction.run = compile_or_run
    for owner, name, make in _MAKE_EMPTY:
        setattr(owner, name, _zeroed_in_pass(make))
    try:
        yield current
    finally:
        for owner, name, make in _MAKE_EMPTY:
            setattr(owner, name, make)
        JITFunction.run = run
        _pass.reset(token)


# A mode of torch would see these calls, too, and every other call and attribute of a tensor.
_MAKE_EMPTY = [
    (owner, name, getattr(owner, name))
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))
]


def _zeroed_in_pass(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def make_zeroed(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        return made if _pass.get() is None else made.zero_()

    return make_zeroed
