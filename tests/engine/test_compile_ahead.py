"""Kernels are compiled at once, before the first of them runs. No GPU is needed: Triton is given a driver
that names one, in a process of its own."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

NUM_KERNELS = 4


def in_new_process(cache: Path, call: Callable[..., Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        patch.setenv("OMP_NUM_THREADS", "1")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
            return executor.submit(call).result(timeout=300)


def named_gpu() -> Any:
    """What Triton asks of a driver, for a Hopper GPU that launches nothing."""
    from triton.backends.compiler import GPUTarget

    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )


def compile_twice() -> tuple[int, int, int, bool]:
    """Kernels compiled at first and again, threads that took part, and whether what they write is zero."""
    import triton
    from triton import knobs

    from dayshift.engine.kernels import activation, invariant_linear, norm
    from dayshift.engine.kernels.ahead import compile_ahead

    triton.runtime.driver.set_active(named_gpu())
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    outs: list[torch.Tensor] = []
    compiled: list[str] = []
    knobs.compilation.listener = lambda **event: compiled.append(event["metadata"]["name"])

    def launch() -> None:
        for _ in range(2):  # as many layers
            outs.append(norm.rms_norm(x, x[0], 1e-6))
            outs.append(norm.rms_norm(x, x[0], 1e-6, x)[0])
            outs.append(activation.silu_mul(x))
            outs.append(invariant_linear.multiply(x, x))

    first = compile_ahead(launch)
    again = compile_ahead(launch)
    return first, again, len(compiled), all(not out.any() for out in outs)


def test_kernels_compile_once_and_are_not_launched(tmp_path: Path):
    first, again, num_compiled, are_zero = in_new_process(tmp_path, compile_twice)
    assert (first, again) == (NUM_KERNELS, 0)
    assert num_compiled == NUM_KERNELS
    assert are_zero
    assert len(list(tmp_path.rglob("*.cubin"))) == NUM_KERNELS


def test_another_process_finds_them_in_the_cache(tmp_path: Path):
    in_new_process(tmp_path, compile_twice)
    cubins = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}
    in_new_process(tmp_path, compile_twice)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")} == cubins


def refuse() -> str:
    """The error of a kernel that does not compile."""
    import triton
    import triton.language as tl

    from dayshift.engine.kernels.ahead import compile_ahead

    triton.runtime.driver.set_active(named_gpu())

    @triton.jit
    def wrong(x_ptr):
        tl.static_assert(1 == 2, "never")

    try:
        compile_ahead(lambda: wrong[(1,)](torch.zeros(1)))
    except triton.CompilationError as error:
        return str(error)
    return ""


def test_a_kernel_that_does_not_compile_says_so(tmp_path: Path):
    assert "never" in in_new_process(tmp_path, refuse)
