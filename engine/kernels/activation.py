"""Triton kernel of `gated_activation` and `silu_mul`; `reference.gated_activation` specifies it."""

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
    return gated_activation(gate_up, "silu")


def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """The gated activation `kind` of (num_tokens, 2 * intermediate), in one pass over memory.

    Shapes, dtypes and formulas as in `reference.gated_activation`.
    """
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, _COLUMNS))
        _gated_activation[grid](gate_up, y, size, gate_up.stride(0), KIND=kind, COLUMNS=_COLUMNS)
    return y


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """The gated activation of float32 values, for kernels."""
    if KIND == "silu":
        slope = gate
    elif KIND == "gelu_tanh":  # (1 + tanh(z)) / 2 is the sigmoid of 2 z
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        tl.static_assert(KIND == "clamped_swiglu")
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        slope = 1.702 * gate
    return gate / (1.0 + tl.exp(-slope)) * up


@triton.jit
def gated_narrow(gate, up, KIND: tl.constexpr, narrow: tl.constexpr):
    """The gated activation of values that are rounded first, as when they are stored between the ops."""
    return gated(gate.to(narrow).to(tl.float32), up.to(narrow).to(tl.float32), KIND).to(narrow)


@triton.jit
def _gated_activation(gate_up_ptr, y_ptr, size, token_stride, KIND: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = column < size
    gate_ptr = gate_up_ptr + token * token_stride + column
    narrow = tl.load(gate_ptr, mask=is_inside, other=0.0)
    up = tl.load(gate_ptr + size, mask=is_inside, other=0.0)
    y = gated(narrow.to(tl.float32), up.to(tl.float32), KIND)
    tl.store(y_ptr + token * size + column, y.to(narrow.dtype), mask=is_inside)
