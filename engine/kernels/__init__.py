"""The engine's ops, chosen by the device of their tensors: CPU → torch twins, CUDA → Triton.

`reference` specifies every op (formula, shapes, dtypes); the twins have the same names there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from dayshift.engine.kernels import (
    activation,
    attention,
    embedding,
    few_token_linear,
    invariant,
    moe,
    norm,
    quantized,
    reference,
    reference_placement,
    reference_quantized,
    reference_sampling,
    rotary,
    routing,
    sampling,
    step_placement,
    tiled_experts,
)
from dayshift.engine.kernels.kv_transfer import copy_blocks, gather_kv, scatter_kv
from dayshift.engine.kernels.policy import batch_invariance, is_batch_invariant
from dayshift.engine.kernels.prompt_attention import prompt_attention

__all__ = [
    "batch_invariance",
    "copy_blocks",
    "dequantize_packed",
    "draw_by_race",
    "embed",
    "gated_activation",
    "gather_kv",
    "largest",
    "linear",
    "moe_mlp",
    "norm_gated_linear",
    "norm_linear",
    "norm_moe",
    "norm_rope_store_kv",
    "norm_router",
    "paged_attention",
    "place_step",
    "prompt_attention",
    "quantized_linear",
    "quantized_moe",
    "quantized_norm_gated_linear",
    "quantized_norm_linear",
    "rms_norm",
    "rope",
    "rope_store_kv",
    "route_top_k",
    "scatter_kv",
    "silu_mul",
    "store_kv",
    "sum_picks",
]


def _by_device[Op: Callable[..., Any]](twin: Op, kernel: Op, batch_invariant: Op | None = None) -> Op:
    """An op that runs where its first tensor (or packed matrix) is.

    `batch_invariant` is the kernel within `batch_invariance`, where the other is chosen by the batch.
    """
    invariant_kernel = batch_invariant or kernel

    @functools.wraps(twin)
    def op(first: Any, *args: Any, **kwargs: Any) -> Any:
        if not first.is_cuda:
            return twin(first, *args, **kwargs)
        return (invariant_kernel if is_batch_invariant() else kernel)(first, *args, **kwargs)

    return cast("Op", op)


draw_by_race = _by_device(reference_sampling.draw_by_race, sampling.draw_by_race)
embed = _by_device(reference.embed, embedding.embed)
largest = _by_device(reference_sampling.largest, sampling.largest)
dequantize_packed = _by_device(reference_quantized.dequantize_packed, quantized.dequantize_packed)
linear = _by_device(reference.linear, few_token_linear.linear, invariant.linear)
norm_linear = _by_device(reference.norm_linear, few_token_linear.norm_linear, invariant.norm_linear)
norm_gated_linear = _by_device(
    reference.norm_gated_linear, few_token_linear.norm_gated_linear, invariant.norm_gated_linear
)
gated_activation = _by_device(reference.gated_activation, activation.gated_activation)
moe_mlp = _by_device(reference.moe_mlp, moe.moe_mlp, invariant.moe_mlp)
norm_moe = _by_device(reference.norm_moe, moe.norm_moe, invariant.norm_moe)
norm_router = _by_device(reference.norm_router, routing.norm_router, invariant.norm_router)
norm_rope_store_kv = _by_device(reference.norm_rope_store_kv, rotary.norm_rope_store_kv)
paged_attention = _by_device(reference.paged_attention, attention.paged_attention, invariant.paged_attention)
place_step = _by_device(reference_placement.place_step, step_placement.place_step)
quantized_linear = _by_device(reference_quantized.quantized_linear, quantized.quantized_linear)
quantized_moe = _by_device(reference_quantized.quantized_moe, quantized.quantized_moe)
quantized_norm_gated_linear = _by_device(
    reference_quantized.quantized_norm_gated_linear, quantized.quantized_norm_gated_linear
)
quantized_norm_linear = _by_device(reference_quantized.quantized_norm_linear, quantized.quantized_norm_linear)
rms_norm = _by_device(reference.rms_norm, norm.rms_norm)
rope = _by_device(reference.rope, rotary.rope)
route_top_k = _by_device(reference.route_top_k, routing.route_top_k)
rope_store_kv = _by_device(reference.rope_store_kv, rotary.rope_store_kv)
silu_mul = _by_device(reference.silu_mul, activation.silu_mul)
sum_picks = _by_device(reference.sum_picks, tiled_experts.sum_picks)
store_kv = _by_device(reference.store_kv, rotary.store_kv)
