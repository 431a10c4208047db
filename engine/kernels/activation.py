"""Triton kernel of `silu_mul`; `reference.silu_mul` specifies it."""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of (num_tokens, 2 * intermediate), in one pass over memory.

    Shapes and dtypes as in `reference.silu_mul`. Source: Shazeer, arXiv:2002.05202.
    """
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, _COLUMNS))
        _silu_mul[grid](gate_up, y, size, gate_up.stride(0), COLUMNS=_COLUMNS)
    return y


@triton.jit
def _silu_mul(gate_up_ptr, y_ptr, size, token_stride, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = column < size
    gate_ptr = gate_up_ptr + token * token_stride + column
    gate = tl.load(gate_ptr, mask=is_inside, other=0.0)
    up = tl.load(gate_ptr + size, mask=is_inside, other=0.0)
    wide = gate.to(tl.float32)
    y = wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)
    tl.store(y_ptr + token * size + column, y.to(gate.dtype), mask=is_inside)
