"""Moves of keys and values between pool slots and contiguous tensors, and between blocks.

Torch's index kernels already run at memory speed on the CPU and on CUDA, so these have no Triton form.
A pool may carry leading dimensions, such as (num_layers, num_blocks, block_size, kv_heads, head_dim):
all layers are moved together, and a piece has the shape (num_layers, num_tokens, kv_heads, head_dim).
Pieces of a pool of quantised KV (`quant.kv`) are float32.
"""

from __future__ import annotations

import torch

from dayshift.engine.quant import kv


def gather_kv(
    k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the keys and values of some slots out of the pools, as for the archive or a compaction.

    Args:
        k_pool, v_pool: (..., num_blocks, block_size, kv_heads, head_dim) contiguous.
        slots: (num_tokens,) int64, slot = block_id * block_size + offset.

    Returns:
        k and v, each (..., num_tokens, kv_heads, head_dim), new tensors.
    """
    return _read(k_pool, slots), _read(v_pool, slots)


def scatter_kv(
    k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write keys and values into their slots, in place: the inverse of `gather_kv`.

    Args:
        k, v: (..., num_tokens, kv_heads, head_dim), the pools' dtype (floats for quantised pools) and device.
        k_pool, v_pool: (..., num_blocks, block_size, kv_heads, head_dim) contiguous.
        slots: (num_tokens,) int64, distinct.
    """
    _write(k, k_pool, slots)
    _write(v, v_pool, slots)


def copy_blocks(
    k_pool: torch.Tensor, v_pool: torch.Tensor, source_ids: torch.Tensor, target_ids: torch.Tensor
) -> None:
    """Copy whole blocks inside the pools, in place, as for a forked sequence that starts to write.

    Args:
        k_pool, v_pool: (..., num_blocks, block_size, kv_heads, head_dim).
        source_ids, target_ids: (num_copies,) int64; targets distinct. Sources are read before targets
            are written, so the two may overlap.
    """
    for pool in (k_pool, v_pool):
        pool.index_copy_(-4, target_ids, pool.index_select(-4, source_ids))


def _read(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    if kv.is_quantized(pool):
        return kv.read_slots(pool, slots)
    return _by_slot(pool).index_select(-3, slots)


def _write(x: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> None:
    if kv.is_quantized(pool):
        kv.write_slots(x, pool, slots)
    else:
        _by_slot(pool).index_copy_(-3, slots, x)


def _by_slot(pool: torch.Tensor) -> torch.Tensor:
    """View a pool as (..., num_slots, kv_heads, head_dim); raises if it would have to be copied."""
    return pool.view(*pool.shape[:-4], -1, *pool.shape[-2:])
