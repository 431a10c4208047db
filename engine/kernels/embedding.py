"""Triton kernel of `embed`; `reference.embed` specifies it.

The first product of a step asks for its weights while this runs.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels.launch import let_next_begin, overlap_options, padded, wait_for_previous

_MOST_COLUMNS = 2048  # of a row, for a program


def embed(weight: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens' rows of the embedding, and zeros that nothing has been added to, in one launch.

    Shapes and dtypes as in `reference.embed`.
    """
    num_tokens, size = len(token_ids), weight.shape[1]
    hidden, residual = (
        torch.empty((num_tokens, size), dtype=weight.dtype, device=weight.device) for _ in range(2)
    )
    columns = min(_MOST_COLUMNS, padded(size))
    if num_tokens:
        _embed[(num_tokens, triton.cdiv(size, columns))](
            token_ids,
            weight,
            hidden,
            residual,
            weight.stride(0),
            SIZE=size,
            COLUMNS=columns,
            **overlap_options(weight.device),
        )
    return hidden, residual


@triton.jit
def _embed(
    token_ids_ptr,
    weight_ptr,
    hidden_ptr,
    residual_ptr,
    row_stride,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """COLUMNS of one token."""
    let_next_begin(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = weight_ptr + tl.load(token_ids_ptr + token) * row_stride
    hidden = tl.load(row + column, mask=column < SIZE, other=0.0)
    to = token * SIZE + column
    tl.store(hidden_ptr + to, hidden, mask=column < SIZE)
    tl.store(residual_ptr + to, tl.zeros_like(hidden), mask=column < SIZE)
