"""Linear layers, alone or behind the norm before them, by the kernel that is fastest for their size.

One token: `one_token_bulk` for large weights on GPUs that have bulk copies, else `one_token_linear`, with the
norm in front and the gated activation behind in the same launch.
Some tokens: `tiled_linear`, behind a norm of its own, which takes 1.4 µs where every program would have to
norm all tokens. More: cuBLAS, for long prompts by the tiles of `tuned_linear`. How many are some comes from
these times on an H200, in µs, the best tiles first and cuBLAS in brackets, to which the launch of the gated
activation has to be added:

    rows x columns            8 tokens       32             64             100
    4096 x 4096               10.8 (12.5)    10.9 (13.0)    11.7 (12.2)    14.7 (12.5)
    4096 x 14336              30.3 (31.2)    30.7 (32.4)    32.9 (34.9)    37.3 (37.0)
    2048 x 4096                7.1  (8.8)     7.1  (9.1)     7.8  (9.2)    10.2 (10.0)
    28672 x 4096, gated       55.5 (56.2)    57.3 (57.4)    61.0 (61.2)    65.7 (62.4)
    6144 x 4096               15.4 (15.9)    16.5 (16.3)    20.9 (16.2)    26.3 (16.8)
    5120 x 2048                8.8  (8.0)     9.5  (8.3)    12.5  (8.4)    16.9 (10.0)

`reference` specifies every op.
"""

from __future__ import annotations

import torch

from dayshift.engine.kernels import (
    activation,
    norm,
    one_token_bulk,
    one_token_linear,
    tiled_linear,
    tuned_linear,
)
from dayshift.engine.models.config import Activation


def most_tiled_tokens(num_weight_rows: int, size: int) -> int:
    """Up to how many tokens `tiled_linear` is the faster one: the table above, in a rule."""
    if num_weight_rows <= size:
        return 64
    return 32 if num_weight_rows * size > 1 << 24 else 16


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x weightᵀ + bias. Shapes and dtypes as in `reference.linear`."""
    if len(x) == 1:
        return _multiply_token(x, weight, bias=bias)[0]
    if 0 < len(x) <= most_tiled_tokens(*weight.shape):
        return tiled_linear.multiply(x, weight, bias)
    return tuned_linear.linear(x, weight, bias)


def norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of x + residual, then `linear`; also the sum. As in `reference.norm_linear`."""
    if len(x) == 1:
        return _multiply_token(x, weight, eps, bias=bias, residual=residual, norm_weight=norm_weight)
    normed, summed = norm.rms_norm(x, norm_weight, eps, residual)
    return linear(normed, weight, bias), summed


def norm_gated_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    gate_up: torch.Tensor,
    kind: Activation = "silu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of x + residual, `linear`, `gated_activation`; also the sum.

    Shapes and dtypes as in `reference.norm_gated_linear`.
    """
    if len(x) == 1:
        return _multiply_token(x, gate_up, eps, residual=residual, norm_weight=norm_weight, kind=kind)
    normed, summed = norm.rms_norm(x, norm_weight, eps, residual)
    if 0 < len(x) <= most_tiled_tokens(*gate_up.shape):
        return tiled_linear.multiply(normed, gate_up, kind=kind), summed
    return activation.gated_activation(tuned_linear.linear(normed, gate_up), kind), summed


def _multiply_token(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 0.0,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    kind: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    can_bulk = one_token_bulk.can_multiply(
        x, weight, bias=bias, residual=residual, norm_weight=norm_weight, kind=kind
    )
    multiply = one_token_bulk.multiply if can_bulk else one_token_linear.multiply
    return multiply(x, weight, bias=bias, residual=residual, norm_weight=norm_weight, eps=eps, kind=kind)
