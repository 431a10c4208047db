"""What NVRTC makes of the kernels in CUDA C++, for a GPU that need not be there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import triton

from dayshift.engine.kernels import cuda_source
from dayshift.engine.kernels.cuda_source import CudaKernel, cubin_of

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Resources:
    """Of a kernel."""

    registers: int  # of a thread
    stack_bytes: int  # of a thread: what did not fit into its registers
    shared_bytes: int  # of a program, beside what its launch asks for; the GPU takes 1,024 of them


@dataclass(frozen=True, slots=True)
class CudaLaunch:
    """A launch that was not done."""

    kernel: CudaKernel
    num_programs: int
    num_threads: int
    shared_bytes: int


def resources_of(kernel: CudaKernel, architecture: str) -> Resources:
    """The kernel compiled for a GPU as `sm_90a`."""
    text = _own(kernel, _read(kernel, architecture, "cuobjdump", "-res-usage"))
    found = dict(re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text))
    assert found["LOCAL"] == "0"
    return Resources(int(found["REG"]), int(found["STACK"]), int(found["SHARED"]))


def machine_code_of(kernel: CudaKernel, architecture: str) -> list[str]:
    """Names of the instructions of the kernel compiled for a GPU as `sm_90a`, in their order."""
    text = _own(kernel, _read(kernel, architecture, "cuobjdump", "-sass"))
    return re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", text, re.MULTILINE)


def _own(kernel: CudaKernel, text: str) -> str:
    """What is said of the kernel, where its source has several."""
    (own,) = re.findall(rf"Function (?:: )?{kernel.name}\b(.*?)(?=Function|\Z)", text, re.DOTALL)
    return own


def _read(kernel: CudaKernel, architecture: str, tool: str, option: str) -> str:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin_of(kernel, architecture))
        file.flush()
        command = [_TOOLS / tool, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@contextmanager
def cuda_launches(capability: int) -> Iterator[list[CudaLaunch]]:
    """Launches in CUDA C++ are compiled for a GPU of this capability, and listed."""
    found: list[CudaLaunch] = []

    def compile_only(
        kernel: CudaKernel,
        num_programs: int,
        num_threads: int,
        *args: Any,
        shared_bytes: int,
    ) -> None:
        cubin_of(kernel, f"sm_{capability}a")
        found.append(CudaLaunch(kernel, num_programs, num_threads, shared_bytes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_source.CudaKernel, "launch", compile_only)
        yield found
