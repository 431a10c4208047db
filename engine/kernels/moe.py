"""`moe_mlp` on the GPU: kernels of our own for few tokens, beyond them two grouped matrix products.

`reference.moe_mlp` specifies it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dayshift.engine.kernels import few_token_experts, reference
from dayshift.engine.kernels.activation import gated_activation as triton_gated_activation
from dayshift.engine.models.config import Activation


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
    """The mixture by the faster of the two ways. Shapes and dtypes as in `reference.moe_mlp`."""
    is_few = len(x) <= few_token_experts.MAX_TOKENS
    mixture = few_token_experts.moe_mlp if is_few else grouped_moe_mlp
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


def grouped_moe_mlp(
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
    """Every expert's MLP over its own tokens, in one product for gate and up and one for down.

    Shapes and dtypes as in `reference.moe_mlp`. Nothing here waits for the device, and the sum over
    a token's experts has a fixed order. Source: grouped GEMM of CUTLASS, through torch.
    """
    num_picked = expert_ids.shape[1]
    by_expert, order = expert_ids.flatten().sort(stable=True)  # (num_tokens * num_picked,)
    experts = torch.arange(gate_up.shape[0], device=x.device)
    ends = torch.searchsorted(by_expert, experts, right=True, out_int32=True)  # (num_experts,)

    gated_activation = triton_gated_activation if x.is_cuda else reference.gated_activation
    inner = F.grouped_mm(x[order // num_picked], gate_up.transpose(1, 2), offs=ends)
    if gate_up_bias is not None:
        inner = inner + gate_up_bias[by_expert]
    sorted_out = F.grouped_mm(gated_activation(inner, activation), down.transpose(1, 2), offs=ends)
    if down_bias is not None:
        sorted_out = sorted_out + down_bias[by_expert]

    out = torch.empty_like(sorted_out)
    out[order] = sorted_out
    per_token = out.view(*expert_ids.shape, x.shape[1]).float()  # (num_tokens, num_picked, hidden)
    return (per_token * weights.unsqueeze(-1)).sum(1).to(x.dtype)
