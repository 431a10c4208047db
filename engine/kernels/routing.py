"""Which experts a token goes to.

`reference.norm_router` and `reference.route_top_k` specify the first. Nothing is read back to the host,
and nothing depends on the order in which programs run.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dayshift.engine.kernels import token_router
from dayshift.engine.kernels.launch import let_next_begin, overlap_options, padded, wait_for_previous
from dayshift.engine.kernels.norm import rms_norm

_MAX_ROUTED = 16  # tokens; beyond it every token reading the whole router costs more than two launches
_EXPERTS = 4  # that a program multiplies a token by


def norm_router(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rms_norm` of x + residual and its product with the router; in one launch for few tokens.

    Shapes and dtypes as in `reference.norm_router`.
    """
    if bias is None and token_router.can_route(x, residual, norm_weight, router):
        return token_router.route(x, residual, norm_weight, eps, router)
    if len(x) > _MAX_ROUTED:
        normed, summed = rms_norm(x, norm_weight, eps, residual)
        return normed, F.linear(normed, router, bias), summed
    num_tokens, size = x.shape
    num_experts, columns = len(router), padded(size)
    normed, summed = (torch.empty((num_tokens, size), dtype=x.dtype, device=x.device) for _ in range(2))
    logits = torch.empty((num_tokens, num_experts), dtype=x.dtype, device=x.device)
    if num_tokens:
        _norm_router[(triton.cdiv(num_experts, _EXPERTS), num_tokens)](
            x,
            residual,
            norm_weight,
            router,
            router if bias is None else bias,  # not read
            normed,
            logits,
            summed,
            num_experts,
            x.stride(0),
            residual.stride(0),
            eps,
            SIZE=size,
            COLUMNS=columns,
            EXPERTS=_EXPERTS,
            HAS_BIAS=bias is not None,
            num_warps=max(4, min(16, columns // 512)),
            **overlap_options(x.device),
        )
    return normed, logits, summed


def route_top_k(
    logits: torch.Tensor, num_picked: int, is_normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of softmax(logits) and their experts, in one launch; any number of tokens.

    Shapes and dtypes as in `reference.route_top_k`; of equal logits the first is picked first.
    """
    num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, num_picked), dtype=torch.float32, device=logits.device)
    expert_ids = torch.empty((num_tokens, num_picked), dtype=torch.int64, device=logits.device)
    if num_tokens:
        _route_token[(num_tokens,)](
            logits,
            weights,
            expert_ids,
            num_experts,
            logits.stride(0),
            NUM_PICKED=num_picked,
            PICKED_PAD=padded(num_picked),
            EXPERTS_PAD=padded(num_experts),
            IS_NORMALIZED=is_normalized,
            num_warps=1,
            **overlap_options(logits.device),
        )
    return weights, expert_ids


@triton.jit
def _norm_router(
    x_ptr,
    residual_ptr,
    norm_ptr,
    router_ptr,
    bias_ptr,
    normed_ptr,
    logits_ptr,
    summed_ptr,
    num_experts,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """EXPERTS logits of one token; the first program of a token keeps what was normed."""
    let_next_begin(OVERLAPS)
    token = tl.program_id(1).to(tl.int64)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    column = tl.arange(0, COLUMNS)
    is_column = column < SIZE
    weight = tl.load(
        router_ptr + expert[:, None] * SIZE + column[None, :],
        mask=(expert < num_experts)[:, None] & is_column[None, :],
        other=0.0,
    )
    norm = tl.load(norm_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    x = tl.load(x_ptr + token * x_stride + column, mask=is_column, other=0.0)
    residual = tl.load(residual_ptr + token * residual_stride + column, mask=is_column, other=0.0)
    summed = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    wide = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    normed = (wide * scale * norm).to(x.dtype)
    if tl.program_id(0) == 0:
        tl.store(summed_ptr + token * SIZE + column, summed, mask=is_column)
        tl.store(normed_ptr + token * SIZE + column, normed, mask=is_column)
    logit = tl.sum(weight.to(tl.float32) * normed.to(tl.float32)[None, :], axis=1)
    if HAS_BIAS:
        logit += tl.load(bias_ptr + expert, mask=expert < num_experts, other=0.0).to(tl.float32)
    tl.store(logits_ptr + token * num_experts + expert, logit.to(x.dtype), mask=expert < num_experts)


@triton.jit
def _route_token(
    logits_ptr,
    weights_ptr,
    expert_ids_ptr,
    num_experts,
    token_stride,
    NUM_PICKED: tl.constexpr,
    PICKED_PAD: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Pick the experts of the program's token, one after the other."""
    let_next_begin(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_PAD)
    logits = tl.load(
        logits_ptr + token * token_stride + expert, mask=expert < num_experts, other=float("-inf")
    ).to(tl.float32)
    largest = tl.max(logits, axis=0)
    total = tl.sum(tl.exp(logits - largest), axis=0)
    pick = tl.arange(0, PICKED_PAD)
    picked = tl.zeros((PICKED_PAD,), tl.int32)
    weights = tl.zeros((PICKED_PAD,), tl.float32)
    for index in tl.static_range(NUM_PICKED):
        value, best = tl.max(logits, axis=0, return_indices=True)
        picked = tl.where(pick == index, best, picked)
        weights = tl.where(pick == index, tl.exp(value - largest) / total, weights)
        logits = tl.where(expert == best, float("-inf"), logits)
    if IS_NORMALIZED:
        weights = weights / tl.sum(weights, axis=0)
    out = token * NUM_PICKED + pick
    tl.store(weights_ptr + out, weights, mask=pick < NUM_PICKED)
    tl.store(expert_ids_ptr + out, picked.to(tl.int64), mask=pick < NUM_PICKED)
