"""Layers with quantised matrices, whose weights are unpacked in registers; see `quant.packed`.

`reference_quantized` specifies the ops. Few tokens are made fixed-point numbers (`quantized_inputs`, in one
launch with the norm in front of the layer) and multiplied with the weights as they lie in memory
(`quantized_products`, in one launch with what comes behind). Many tokens (prefill) unpack the matrix and
take a dense product instead. Nothing is read back to the host. A token's result does not depend on the
other tokens of its batch within each of the two ways.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from dayshift.engine.kernels.activation import gated_activation
from dayshift.engine.kernels.norm import rms_norm
from dayshift.engine.kernels.quantized_inputs import FixedPoint, fixed_norm, fixed_point
from dayshift.engine.kernels.quantized_products import Picks, multiply
from dayshift.engine.kernels.quantized_unpack import dequantize_packed
from dayshift.engine.models.config import Activation
from dayshift.engine.quant.packed import PackedMatrix

__all__ = [
    "MAX_TOKENS",
    "dequantize_packed",
    "products",
    "quantized_linear",
    "quantized_moe",
    "quantized_norm_gated_linear",
    "quantized_norm_linear",
]

MAX_TOKENS = 16
"""Beyond it the weights are unpacked once for all tokens."""


def quantized_linear(
    x: torch.Tensor,
    matrices: Sequence[PackedMatrix],
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y = x wᵀ + bias. Shapes and dtypes as in `reference_quantized.quantized_linear`."""
    if len(x) > MAX_TOKENS:
        outs = [F.linear(x, dequantize_packed(matrix, x.dtype)) for matrix in matrices]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
        out = out if bias is None else out + bias
        return out if out_dtype is None else out.to(out_dtype)
    return products(fixed_point(x), x, matrices, bias, out_dtype)


def quantized_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    matrices: Sequence[PackedMatrix],
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of the normed sum of x and residual; and the sum.

    Shapes and dtypes as in `reference_quantized.quantized_norm_linear`.
    """
    if len(x) > MAX_TOKENS:
        normed, summed = rms_norm(x, norm_weight, eps, residual)
        return quantized_linear(normed, matrices, bias), summed
    points, summed = fixed_norm(x, residual, norm_weight, eps)
    return products(points, x, matrices, bias), summed


def quantized_norm_gated_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    gate_up: Sequence[PackedMatrix],
    kind: Activation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for a layer of gate and up, with the gated activation behind it.

    Shapes and dtypes as in `reference_quantized.quantized_norm_gated_linear`.
    """
    if len(x) > MAX_TOKENS or len(gate_up) > 1:
        y, summed = quantized_norm_linear(x, residual, norm_weight, eps, gate_up)
        return gated_activation(y, kind), summed
    points, summed = fixed_norm(x, residual, norm_weight, eps)
    inner = x.new_empty((len(x), gate_up[0].num_rows // 2))
    multiply(points, gate_up[0], inner, kind=kind)
    return inner, summed


def quantized_moe(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    gate_up: Sequence[PackedMatrix],
    down: PackedMatrix,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: Activation,
) -> torch.Tensor:
    """Mixture of gated MLPs. Shapes and dtypes as in `reference_quantized.quantized_moe`.

    Every pick reads its expert's matrices, so this is for few tokens.
    """
    points, inner_size = fixed_point(x), down.num_columns
    each = Picks(expert_ids, weights, is_summed=False)
    inner = x.new_empty((expert_ids.numel(), inner_size))
    if len(gate_up) == 1:
        multiply(points, gate_up[0], inner, bias=gate_up_bias, kind=activation, picks=each)
    else:
        both = x.new_empty((expert_ids.numel(), 2 * inner_size))
        for out, matrix, bias in _of_parts(both, gate_up, gate_up_bias):
            multiply(points, matrix, out, bias=bias, picks=each)
        inner = gated_activation(both, activation)
    y = torch.empty_like(x)
    multiply(fixed_point(inner), down, y, bias=down_bias, picks=Picks(expert_ids, weights, is_summed=True))
    return y


def products(
    points: FixedPoint,
    like: torch.Tensor,
    matrices: Sequence[PackedMatrix],
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The products with matrices one below the other, of few tokens; in `out_dtype`, or that of `like`."""
    y = like.new_empty((len(like), sum(matrix.num_rows for matrix in matrices)), dtype=out_dtype)
    for out, matrix, bias_part in _of_parts(y, matrices, bias):
        multiply(points, matrix, out, bias=bias_part)
    return y


def _of_parts(
    y: torch.Tensor, matrices: Sequence[PackedMatrix], bias: torch.Tensor | None
) -> list[tuple[torch.Tensor, PackedMatrix, torch.Tensor | None]]:
    """Each matrix with its columns of y and of the bias."""
    sizes = [matrix.num_rows for matrix in matrices]
    biases = [None] * len(sizes) if bias is None else bias.split(sizes, dim=-1)
    return list(zip(y.split(sizes, dim=-1), matrices, biases, strict=True))
