"""Kernels are compiled at once, before the first of them runs. No GPU is needed: Triton is given a driver
that names one, in a process of its own."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
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


def named_gpu(loaded: list[str] | None = None) -> Any:
    """What Triton asks of a driver, for a Hopper GPU that launches nothing. It lists what it loads."""
    from triton.backends.compiler import GPUTarget

    def load(name: str, *_: Any) -> tuple[Any, ...]:
        (loaded if loaded is not None else []).append(name)
        return object(), 0, 0, 0, 1024

    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=lambda src, metadata: object(),
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232_448}, load_binary=load
        ),
    )


def compile_twice() -> tuple[int, int, int, int, bool]:
    """Kernels found at first and again, compiled and loaded, and whether what they write is zero."""
    import triton
    from triton import knobs

    from dayshift.engine.kernels import activation, invariant_linear, norm
    from dayshift.engine.kernels.ahead import compile_ahead

    loaded: list[str] = []
    triton.runtime.driver.set_active(named_gpu(loaded))
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
    return first, again, len(compiled), len(loaded), all(not out.any() for out in outs)


def test_kernels_compile_once_and_are_not_launched(tmp_path: Path):
    first, again, num_compiled, num_loaded, are_zero = in_new_process(tmp_path, compile_twice)
    assert (first, again) == (NUM_KERNELS, 0)
    assert num_compiled == num_loaded == NUM_KERNELS
    assert are_zero
    assert len(list(tmp_path.rglob("*.cubin"))) == NUM_KERNELS


def test_another_process_finds_them_in_the_cache(tmp_path: Path):
    in_new_process(tmp_path, compile_twice)
    cubins = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}
    in_new_process(tmp_path, compile_twice)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")} == cubins


def pass_beside_others() -> tuple[bool, bool, bool]:
    """Whether a launch of the pass finds the kernel of one before it, whether memory of another thread stays
    as it was, and whether torch is as before when the pass has ended."""
    import triton

    from dayshift.engine.kernels import norm
    from dayshift.engine.kernels.ahead import compile_ahead

    triton.runtime.driver.set_active(named_gpu())
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    makers = torch.empty, torch.empty_like, torch.Tensor.new_empty
    is_found, is_untouched = False, False

    def launch() -> None:
        nonlocal is_found, is_untouched
        kernels = norm._rms_norm.device_caches[0][0]  # pyright: ignore
        while not kernels:
            norm.rms_norm(x, x[0], 1e-6)
        is_found = True
        with ThreadPoolExecutor(1) as other, pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "zero_", refuse_to_write)
            other.submit(lambda: (torch.empty(3), torch.empty_like(x), x.new_empty(3))).result()
        is_untouched = True

    compile_ahead(launch)
    return is_found, is_untouched, makers == (torch.empty, torch.empty_like, torch.Tensor.new_empty)


def refuse_to_write(tensor: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a tensor of another thread is written to")


def test_a_pass_finds_what_it_has_compiled_and_leaves_others_alone(tmp_path: Path):
    assert in_new_process(tmp_path, pass_beside_others) == (True, True, True)


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
