"""Torch twins of the ops with quantised matrices; see `reference`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from dayshift.engine.kernels.reference import gated_activation, rms_norm
from dayshift.engine.models.config import Activation
from dayshift.engine.quant.packed import PackedMatrix, unpack


def quantized_linear(
    x: torch.Tensor,
    matrices: Sequence[PackedMatrix],
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Product with quantised matrices, y = x wᵀ + bias, w as `quant.packed.unpack` gives it.

    Args:
        x: (num_tokens, num_columns), last dimension contiguous.
        matrices: what the layer's matrix is put together from, one below the other, on x's device.
        bias: (num_rows of all matrices,), x's dtype.
        out_dtype: of the result; None: x's.

    Returns:
        (num_tokens, num_rows of all matrices), contiguous, x's dtype or `out_dtype`.
    """
    y = torch.cat([F.linear(x.float(), unpack(matrix)) for matrix in matrices], dim=-1)
    return (y if bias is None else y + bias.float()).to(out_dtype or x.dtype)


def quantized_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    matrices: Sequence[PackedMatrix],
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` with a residual, then `quantized_linear`; arguments as there.

    Returns:
        y (num_tokens, num_rows of all matrices) and x + residual (num_tokens, num_columns), x's dtype.
    """
    normed, summed = rms_norm(x, norm_weight, eps, residual)
    return quantized_linear(normed, matrices, bias), summed


def quantized_norm_gated_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    gate_up: Sequence[PackedMatrix],
    kind: Activation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` with a residual, then `quantized_linear`, then `gated_activation`; arguments as there.

    Args:
        gate_up: of 2 * intermediate rows, the gate in the first half.

    Returns:
        (num_tokens, intermediate) and x + residual (num_tokens, num_columns), x's dtype.
    """
    y, summed = quantized_norm_linear(x, residual, norm_weight, eps, gate_up)
    return gated_activation(y, kind), summed


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
    """`moe_mlp` with quantised experts: the weighted sum, in float32, of the gated MLPs of a token's experts.

    Args:
        x: (num_tokens, size).
        weights: (num_tokens, num_picked) float32.
        expert_ids: (num_tokens, num_picked) int64.
        gate_up: of 2 * intermediate rows for each expert, the gate in the first half.
        down: (num_experts, size, intermediate).
        gate_up_bias: (num_experts, 2 * intermediate), x's dtype.
        down_bias: (num_experts, size), x's dtype.

    Returns:
        (num_tokens, size), contiguous, x's dtype.
    """
    num_tokens, num_picked = expert_ids.shape
    inputs, of_pick = x.repeat_interleave(num_picked, dim=0), expert_ids.flatten()
    outs = x.new_empty(len(inputs), down.num_rows, dtype=torch.float32)
    for expert_id in of_pick.unique().tolist():
        is_its = of_pick == expert_id
        of_expert = [matrix.expert(expert_id) for matrix in gate_up]
        both = quantized_linear(inputs[is_its], of_expert, _row(gate_up_bias, expert_id))
        inner = gated_activation(both, activation).float()
        outs[is_its] = quantized_linear(inner, [down.expert(expert_id)], _row(down_bias, expert_id))
    return (outs.view(num_tokens, num_picked, -1) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def dequantize_packed(matrix: PackedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """(num_rows, num_columns) or (num_experts, num_rows, num_columns), see `quant.packed.unpack`."""
    return unpack(matrix).to(dtype)


def _row(bias: torch.Tensor | None, index: int) -> torch.Tensor | None:
    return None if bias is None else bias[index]
