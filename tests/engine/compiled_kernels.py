"""What Triton and ptxas make of the kernels for a GPU that need not be there.

A launch becomes a compilation for the GPU that is named: with the constants, and the numbers and pointers
told apart, that a launch on it would have. Nothing is launched.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from tests.engine.cuda_kernels import cuda_launches
from tests.engine.kernel_launches import kernel_name

SHARED_MEMORY_BYTES = {89: 101_376, 90: 232_448, 100: 232_448}  # that a program may take
NUM_PROCESSORS = {89: 142, 90: 132, 100: 148}  # of an L40S, an H200 and a B200
_WAIT = "griddepcontrol.wait"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel as the compiler made it."""

    kernel: JITFunction[Any]
    made: CompiledKernel

    @property
    def name(self) -> str:
        return kernel_name(self.kernel)

    @property
    def ptx(self) -> str:
        return self.made.asm["ptx"]

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program."""
        return self.made.metadata.shared

    @property
    def overlaps(self) -> bool:
        """It may begin before the kernel in front of it has ended."""
        return self.made.metadata.launch_pdl

    @property
    def before_wait(self) -> str:
        """The PTX in front of the wait for the kernel before this one, or all of it; without comments."""
        return re.sub("//.*", "", self.ptx.partition(_WAIT)[0])

    def read_before_wait(self) -> set[str]:
        """Names of the pointers through which memory is read before the wait."""
        signature = self.made.src.signature
        kinds = [found for name, kind in signature.items() for found in _parameters(name, kind)]
        sources: dict[str, set[str]] = {}  # registers and parameters that a register was made of
        for line in self.before_wait.splitlines():
            target, *operands = re.findall(r"%\w+|\w+_param_\d+", line) or [""]
            sources.setdefault(target, set()).update(operands)
        found: set[str] = set()
        for address in re.findall(r"ld\.global.*\[\s*(%\w+)", self.before_wait):
            found |= {name for name in _origins(address, sources) if "_param_" in name}
        read = [kinds[int(name.rpartition("_")[2])] for name in found]
        return {name for name, kind in read if kind.startswith("*")}


def _parameters(name: str, kind: Any) -> list[tuple[str, str]]:
    """Name and type of each parameter that an argument has in PTX; of a tuple `name[0]`, `name[1]`, ..."""
    if isinstance(kind, tuple):
        return [found for i, item in enumerate(kind) for found in _parameters(f"{name}[{i}]", item)]
    return [] if kind == "constexpr" else [(name, kind)]


def _origins(register: str, sources: dict[str, set[str]]) -> set[str]:
    """Everything that a register was made of."""
    found, left = set[str](), {register}
    while left:
        found |= left
        left = set().union(*(sources.get(name, set()) for name in left)) - found
    return found


def compiled(call: Callable[[], object], capability: int) -> list[Compiled]:
    """Each Triton kernel that a call launches, compiled for a GPU of this capability."""
    run, found = JITFunction.run, list[Compiled]()

    def compile_only(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        made = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        assert isinstance(made, CompiledKernel)
        found.append(Compiled(kernel, made))

    with named_gpu(capability), cuda_launches(capability), pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_only)
        call()
    return found


def launched(call: Callable[[], object]) -> set[str]:
    """Names of the kernels that a call launches. Nothing is compiled."""
    names: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: names.add(kernel_name(kernel)))
        call()
    return names


def answers_of(capability: int) -> dict[str, Any]:
    """What functions of a device, which launchers ask, return on a GPU of this capability."""
    return {
        "overlap_options": {"OVERLAPS": True, "launch_pdl": True}
        if capability >= 90
        else {"OVERLAPS": False},
        "shared_memory_bytes": SHARED_MEMORY_BYTES[capability],
        "num_processors": NUM_PROCESSORS[capability],
        "has_dot4": True,
        "has_packed_halves": True,
    }


@contextmanager
def named_gpu(capability: int) -> Iterator[None]:
    """Triton's driver and the launchers see a GPU of this capability, instead of the one that is there."""
    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        # Triton keeps what it has compiled by the number of the device: no real one has this number.
        get_current_device=lambda: capability,
        get_current_stream=lambda device: 0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", gpu)
        for module in [module for path, module in sys.modules.items() if path.startswith("dayshift.")]:
            for name, answer in answers_of(capability).items():
                if hasattr(module, name):
                    patch.setattr(module, name, lambda device, answer=answer: answer)
        yield
