"""The engine's ops, dispatched by the device of their tensors: CPU → torch twins, CUDA → Triton.

`reference` specifies every op (formula, shapes, dtypes); the twins have the same names there.
"""

from __future__ import annotations

from dayshift.engine.kernels.kv_transfer import copy_blocks, gather_kv, scatter_kv
from dayshift.engine.kernels.reference import (
    paged_attention,
    rms_norm,
    rope,
    rope_store_kv,
    silu_mul,
    store_kv,
)

__all__ = [
    "copy_blocks",
    "gather_kv",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_store_kv",
    "scatter_kv",
    "silu_mul",
    "store_kv",
]
