"""`norm_moe` and `moe_mlp` on the GPU: in one launch for one token, by picks for a few, by bulk copies for
some, by tiles beyond.

`reference` specifies both. Microseconds of a layer of Qwen3-30B-A3B on an H200, and the share of
the bandwidth at which the experts' weights are read; `torch._grouped_mm` and what it needs around it
(sort, gather, activation, scatter, sum) took the last column in the same run:

    tokens  way                                     us   of the bandwidth   grouped
         1  one_token_experts, with norm,         22.2
            router and picks (four launches)      25.6
         8  bulk_experts, with picks               110               91 %
        32                                         241               94 %
       100                                         270               96 %
         8  tiled_experts, 16 tokens to a tile     118               85 %
        32                                         248               92 %
       100                                         281               92 %
       133                                         286               90 %       496
       300  32 tokens to a tile                    301               86 %
       590  128 or 64 tokens to a tile             323               80 %       630
     2,340                                         518                        1,065
     8,892                                       1,274                        3,276
"""

from __future__ import annotations

import torch

from dayshift.engine.kernels import (
    bulk_experts,
    few_token_experts,
    one_token_experts,
    routing,
    tiled_experts,
)
from dayshift.engine.models.config import Activation
from dayshift.types import DayshiftError


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
    """By the fastest way. Shapes and dtypes as in `reference.norm_moe`, errors as in `moe_mlp`."""
    router_and_experts = (router, gate_up, down, num_picked)
    has_bias = gate_up_bias is not None or down_bias is not None
    if not has_bias and one_token_experts.can_mix(x, residual, norm_weight, *router_and_experts, router_bias):
        return one_token_experts.mix(
            x,
            residual,
            norm_weight,
            eps,
            *router_and_experts,
            is_normalized,
            router_bias=router_bias,
            activation=activation,
        )
    normed, logits, summed = routing.norm_router(x, residual, norm_weight, eps, router, router_bias)
    if not has_bias and bulk_experts.can_mix(normed, logits, num_picked, gate_up, down):
        mixed = bulk_experts.mix(
            normed, logits, num_picked, is_normalized, gate_up, down, activation=activation
        )
        return mixed, summed
    weights, expert_ids = routing.route_top_k(logits, num_picked, is_normalized)
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    return moe_mlp(normed, weights, expert_ids, gate_up, down, **biases, activation=activation), summed


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
    """The mixture by the faster of the two ways. Shapes and dtypes as in `reference.moe_mlp`.

    Raises DayshiftError if the rows of the experts' weights are not a multiple of 16 bytes long.
    """
    check_sizes(x, down)
    is_few = len(x) <= few_token_experts.MAX_TOKENS
    mixture = few_token_experts.moe_mlp if is_few else tiled_experts.moe_mlp
    return mixture(
        x,
        weights,
        expert_ids,
        gate_up,
        down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=activation,
    )


def check_sizes(x: torch.Tensor, down: torch.Tensor) -> None:
    """Raise DayshiftError if the rows of the experts' weights are not a multiple of 16 bytes long."""
    sizes = x.shape[1], down.shape[2]
    if any(size * x.element_size() % 16 for size in sizes):
        raise DayshiftError(
            f"experts: hidden and intermediate size {sizes[0]} and {sizes[1]} must be multiples of "
            f"{16 // x.element_size()} on a GPU"
        )
