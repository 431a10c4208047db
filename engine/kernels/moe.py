"""`moe_mlp` as two grouped matrix products; `reference.moe_mlp` specifies it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dayshift.engine.kernels import activation, reference


def moe_mlp(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Every expert's MLP over its own tokens, in one product for gate and up and one for down.

    Shapes and dtypes as in `reference.moe_mlp`. Nothing here waits for the device, and the sum over
    a token's experts has a fixed order. Source: grouped GEMM of CUTLASS, through torch.
    """
    num_picked = expert_ids.shape[1]
    by_expert, order = expert_ids.flatten().sort(stable=True)  # (num_tokens * num_picked,)
    experts = torch.arange(gate_up.shape[0], device=x.device)
    ends = torch.searchsorted(by_expert, experts, right=True, out_int32=True)  # (num_experts,)

    silu_mul = activation.silu_mul if x.is_cuda else reference.silu_mul
    inner = silu_mul(F.grouped_mm(x[order // num_picked], gate_up.transpose(1, 2), offs=ends))
    sorted_out = F.grouped_mm(inner, down.transpose(1, 2), offs=ends)

    out = torch.empty_like(sorted_out)
    out[order] = sorted_out
    per_token = out.view(*expert_ids.shape, x.shape[1]).float()  # (num_tokens, num_picked, hidden)
    return (per_token * weights.unsqueeze(-1)).sum(1).to(x.dtype)
