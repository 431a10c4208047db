"""Triton kernels of `paged_attention`; `reference.paged_attention` specifies it.

Two launches share a batch, each for its sequences: those with one query (decodes, `decode_attention`) and
those with several (`chunk_attention`). Where the keys of a chunk are split follows from the model and
from its own lengths, except that in steps of more than 2,048 tokens those of short chunks are not; where
those of a decode are cut follows from the lengths of all decodes of a step. So the last bits of a
sequence's result may depend on its neighbours: `invariant_attention` is the one where they do not.

Nothing is read back to the host: grids follow from shapes, so that a step can be captured in a graph.
"""

from __future__ import annotations

import math

import torch

from dayshift.engine.kernels.chunk_attention import attend_chunks
from dayshift.engine.kernels.decode_attention import attend_decodes
from dayshift.engine.kernels.launch import check_pools, padded
from dayshift.engine.kernels.quantized_tiles import has_packed_halves
from dayshift.engine.quant.kv import is_quantized

_LOG2_E = math.log2(math.e)
_MIN_DOT = 16  # the smallest side of a tile that tensor cores multiply


def paged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    cos_sin: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """softmax(scale * q·k) v per sequence, causal, key j rotated at position j when it is loaded.

    With a window, tiles and splits of keys that no query of theirs sees are not visited. Shapes and
    dtypes as in `reference.paged_attention`.
    """
    check_pools(k_pool, v_pool)
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_pool.shape
    batch = len(seq_lens)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    constants = {
        "SCALE": scale * _LOG2_E,  # exp2 is cheaper than exp
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HALF": head_dim // 2,
        "HALF_PAD": padded(head_dim // 2, _MIN_DOT),
        "BLOCK_SIZE": block_size,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "WINDOW": window or 0,
        "PACKED": is_quantized(k_pool) and q.dtype.itemsize == 2 and has_packed_halves(q.device),
    }
    arguments = (q, k_pool, v_pool, block_tables, seq_lens, query_start, cos_sin, sinks, out, constants)
    if num_tokens > batch:
        attend_chunks(*arguments)
    if num_tokens == batch or batch > 1:
        attend_decodes(*arguments)
    return out
