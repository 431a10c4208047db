"""`norm_router` of 17 to 128 tokens in one launch, on tensor cores.

A program takes 8 tokens and 16 experts, whose weights it has in registers before the kernel in front has
ended. It norms its tokens by itself, a warp each; the first program of the tokens keeps what was normed.
Warps share the columns, and their sums are added in one order. `reference.norm_router` specifies the op.

Written in CUDA C++ (`cuda_source`), for GPUs of capability 9.0 and more.
"""

from __future__ import annotations

import torch

from dayshift.engine.kernels.cuda_source import CudaKernel, cuda_kernel
from dayshift.engine.kernels.launch import overlap_options

_LEAST_TOKENS, _MOST_TOKENS = 17, 128  # fewer are faster by `_norm_router`
_WARPS, _TOKENS, _EXPERTS = 8, 8, 16  # of a program
_COLUMNS = 256  # a multiple of these: 8 warps, or 8 columns for each lane
_MAX_SIZE = 2048  # columns that fit into the registers


def can_route(
    x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, router: torch.Tensor
) -> bool:
    """`route` can do it, and is the faster way on an H200: see docs/engine-speed.md."""
    num_experts, size = router.shape
    return (
        overlap_options(x.device)["OVERLAPS"]
        and _LEAST_TOKENS <= len(x) <= _MOST_TOKENS
        and x.dtype in (torch.bfloat16, torch.float16)
        and residual.dtype == router.dtype == x.dtype
        and norm_weight.dtype == torch.float32
        and size % _COLUMNS == 0
        and size <= _MAX_SIZE
        and num_experts % _EXPERTS == 0
        and router.is_contiguous()
        and norm_weight.is_contiguous()
        and all(tensor.data_ptr() % 16 == 0 for tensor in (x, residual, norm_weight, router))
        and all(tensor.stride(1) == 1 and tensor.stride(0) % 8 == 0 for tensor in (x, residual))
    )


def route(
    x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, router: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `reference.norm_router` without a bias, for what `can_route`."""
    num_experts, size = router.shape
    num_tokens = len(x)
    normed, summed = (torch.empty((num_tokens, size), dtype=x.dtype, device=x.device) for _ in range(2))
    logits = torch.empty((num_tokens, num_experts), dtype=x.dtype, device=x.device)
    kernel(size, x.dtype).launch(
        -(-num_tokens // _TOKENS) * (num_experts // _EXPERTS),
        _WARPS * 32,
        x,
        residual,
        norm_weight,
        router,
        normed,
        logits,
        summed,
        num_tokens,
        num_experts,
        x.stride(0),
        residual.stride(0),
        eps,
        shared_bytes=_TOKENS * (size + 32) * 2 + size * 4 + _WARPS * _EXPERTS * _TOKENS * 4,
    )
    return normed, logits, summed


def kernel(size: int, dtype: torch.dtype) -> CudaKernel:
    """What `route` launches."""
    return cuda_kernel("token_router.cu", "route_tokens", SIZE=size, IS_HALF=int(dtype == torch.float16))
