"""Kernels in CUDA C++, for what Triton cannot say: compiled by NVRTC, launched through CUDA's driver.

Their sources are the `.cu` files beside this module with the `.cuh` files that they include, their constants
macros. What NVRTC made lies in Triton's cache on disk. A launch may be captured into a CUDA graph, overlaps
with the kernels around it as Triton's launches with `overlap_options` do, and is only compiled within
`ahead.compile_ahead`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch  # loads the NVRTC that it was built for
import triton
from cuda.bindings import driver, nvrtc  # pyright: ignore[reportAttributeAccessIssue]  # compiled
from triton.runtime.cache import get_cache_manager

from dayshift.engine.kernels import ahead

_DIRECTORY = Path(__file__).parent
_INCLUDED = Path(triton.__file__).parent / "backends" / "nvidia" / "include"  # cuda_bf16.h and others
_CUBIN = "kernel.cubin"


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """An `extern "C"` kernel of a source with its constants; `cuda_kernel` makes one."""

    source: str  # a file beside this module
    name: str
    constants: tuple[tuple[str, int], ...]

    def launch(
        self,
        num_programs: int,
        num_threads: int,
        *args: torch.Tensor | float,
        shared_bytes: int,
    ) -> None:
        """Launch on the current stream of the first tensor's device, of capability 9.0 or more.

        Args:
            num_programs: thread blocks.
            num_threads: of a program.
            args: tensors as pointers, ints as `int`, floats as `float`.
            shared_bytes: dynamic shared memory of a program.
        """
        device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
        architecture = architecture_of(device)
        if ahead.is_taken_up((self, architecture), functools.partial(cubin_of, self, architecture)):
            return
        if not int(_checked(driver.cuCtxGetCurrent())):
            torch.cuda.set_device(device)  # the first call of a thread
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = num_programs, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream(device).cuda_stream
        config.attrs, config.numAttrs = [_overlap()], 1
        function = _loaded(self, architecture, device, shared_bytes)
        _checked(driver.cuLaunchKernelEx(config, function, _parameters(args), 0))


def cuda_kernel(source: str, name: str, **constants: int) -> CudaKernel:
    """The kernel `name` of a `.cu` file beside this module, with its macros."""
    return CudaKernel(source, name, tuple(sorted(constants.items())))


@functools.cache
def architecture_of(device: torch.device) -> str:
    """As `sm_90a`: code for this GPU alone, which may use all that it has."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


@functools.cache
def cubin_of(kernel: CudaKernel, architecture: str) -> bytes:
    """The kernel as machine code. Raises RuntimeError with the compiler's words."""
    source = (_DIRECTORY / kernel.source).read_text()
    options = [f"--gpu-architecture={architecture}", "-std=c++17", "-default-device"]
    options += [f"-D{name}={value}" for name, value in kernel.constants]
    version = _checked(nvrtc.nvrtcVersion())
    made_of = (source, _headers(), options, version, triton.__version__)
    cache = get_cache_manager(hashlib.sha256(repr(made_of).encode()).hexdigest())
    if path := cache.get_file(_CUBIN):
        return Path(path).read_bytes()
    include = [f"--include-path={path}" for path in (_DIRECTORY, _INCLUDED)]
    cubin = _compile(source, kernel.source, [*options, *include])
    cache.put(cubin, _CUBIN)
    return cubin


@functools.cache
def _headers() -> tuple[str, ...]:
    """Texts of all that a source may include from beside this module."""
    return tuple(path.read_text() for path in sorted(_DIRECTORY.glob("*.cuh")))


def _compile(source: str, file_name: str, options: list[str]) -> bytes:
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), file_name.encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{file_name} does not compile: {log.rstrip(b'\0').decode()}")
    cubin = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return cubin


@functools.cache
def _loaded(kernel: CudaKernel, architecture: str, device: torch.device, shared_bytes: int) -> Any:
    """The kernel in a device's memory, and allowed its shared memory."""
    with torch.cuda.device(device):
        module = _checked(driver.cuModuleLoadData(cubin_of(kernel, architecture)))
        function = _checked(driver.cuModuleGetFunction(module, kernel.name.encode()))
        attribute = driver.CUfunction_attribute
        for name, value in (
            (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
            (attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
        ):
            _checked(driver.cuFuncSetAttribute(function, name, value))
    return function


def _parameters(args: tuple[torch.Tensor | float, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Values and C types of a launch's arguments."""
    values, types = zip(*map(_parameter, args), strict=True)
    return values, types


def _parameter(arg: torch.Tensor | float) -> tuple[float, Any]:
    if isinstance(arg, torch.Tensor):
        return arg.data_ptr(), ctypes.c_void_p
    return arg, ctypes.c_int if isinstance(arg, int) else ctypes.c_float


def _overlap() -> driver.CUlaunchAttribute:
    """The kernel may begin while the one before it ends."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _checked(result: tuple[Any, ...]) -> Any:
    """What a call of a CUDA library returned beside its status, which has to be 0."""
    status, *rest = result
    if int(status):
        raise RuntimeError(f"CUDA returned {status!r}")
    return rest[0] if rest else None
