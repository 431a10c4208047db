"""The batch-invariant kernels of the ops whose fast kernels are chosen by the number of tokens.

Norms, rotations, activations and routing are computed row by row and invariant as they are. What is
left is made of them and of kernels with one tile: products over their whole length, splits of keys at
fixed positions, experts in tiles of one size. `reference` specifies every op.
"""

from __future__ import annotations

import torch

from dayshift.engine.kernels import (
    activation,
    invariant_attention,
    invariant_linear,
    moe,
    norm,
    routing,
    tiled_experts,
)
from dayshift.engine.models.config import Activation

linear = invariant_linear.multiply
paged_attention = invariant_attention.paged_attention


def norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of x + residual, then `linear`; also the sum. As in `reference.norm_linear`."""
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
    """`norm_linear`, then `gated_activation`; also the sum. As in `reference.norm_gated_linear`."""
    y, summed = norm_linear(x, residual, norm_weight, eps, gate_up)
    return activation.gated_activation(y, kind), summed


def norm_router(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The normed sum, the experts' logits, and the sum. As in `reference.norm_router`."""
    normed, summed = norm.rms_norm(x, norm_weight, eps, residual)
    return normed, linear(normed, router, bias), summed


def moe_mlp(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: Activation = "silu",
) -> torch.Tensor:
    """The mixture in tiles of one size. Shapes, dtypes and errors as in `moe.moe_mlp`."""
    moe.check_sizes(x, down)
    return tiled_experts.moe_mlp(
        x,
        weights,
        expert_ids,
        gate_up,
        down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=activation,
        tiling=tiled_experts.TILINGS[1],
    )


def norm_moe(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    num_picked: int,
    is_normalized: bool,
    *,
    router_bias: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: Activation = "silu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm_router`, the picks, and `moe_mlp`; also the sum. As in `reference.norm_moe`."""
    normed, logits, summed = norm_router(x, residual, norm_weight, eps, router, router_bias)
    weights, expert_ids = routing.route_top_k(logits, num_picked, is_normalized)
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    return moe_mlp(normed, weights, expert_ids, gate_up, down, **biases, activation=activation), summed
