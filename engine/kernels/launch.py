"""What the launchers of the Triton kernels share."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def padded(size: int, least: int = 1) -> int:
    """The next power of two that is not below `size` nor below `least`: a Triton tile's side."""
    return max(least, 1 << (size - 1).bit_length())


def check_pools(k_pool: torch.Tensor, v_pool: torch.Tensor) -> None:
    """Raise ValueError unless slots lie in a row, as the kernels address them."""
    if not (k_pool.is_contiguous() and v_pool.is_contiguous()):
        raise ValueError("the KV pools of a layer must be contiguous")


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Options of a launch that may begin while the kernel before it ends, where the GPU can do that.

    Such a kernel has a constant OVERLAPS and calls `let_next_begin` and `wait_for_previous`: before the
    latter it reads nothing but what no launch writes, that is weights, and writes nothing.
    """
    if device.type == "cuda" and _major_capability(device.index) >= 9:
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}


@functools.cache
def _major_capability(device_index: int) -> int:
    return torch.cuda.get_device_capability(device_index)[0]


@functools.cache
def may_share_processors() -> bool:
    """Kernels of other processes may run beside this one's: CUDA's multi-process service is there, which a
    process takes if it finds the service's pipes."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; for other devices, which only tests launch for, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):  # noqa: N803
    """The kernel after this one may begin as soon as all programs have come here, on free processors."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):  # noqa: N803
    """Wait until the kernel before this one, and all before it, have ended and their writes are seen."""
    if OVERLAPS:
        gdc_wait()


@functools.cache
def shared_memory_bytes(device: torch.device) -> int:
    """Shared memory that a program may take on a GPU; for other devices that of a Hopper GPU."""
    if device.type != "cuda":
        return 232_448
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@triton.jit
def load_inside(ptr, is_inside, IS_EVEN: tl.constexpr):  # noqa: N803
    """What lies inside, and zero elsewhere. IS_EVEN: all does, and nothing is compared."""
    if IS_EVEN:
        return tl.load(ptr)
    return tl.load(ptr, mask=is_inside, other=0.0)
