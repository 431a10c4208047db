"""One query of each of a few sequences, in one launch: Triton against the torch twins of what it replaces."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dayshift.engine.kernels import reference, token_attention
from dayshift.engine.kernels.quantized_inputs import FixedPoint
from tests.engine.test_kernels_triton import interpreter as interpreter

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
BLOCK_SIZE = 16


def value_of(points: FixedPoint) -> Tensor:
    """The numbers that fixed-point inputs stand for, float32 (num_tokens, num_columns)."""
    parts = points.parts.view(torch.uint8).view(len(points), points.num_parts, -1).int()
    signed = torch.where(parts[:, -1] > 127, parts[:, -1] - 256, parts[:, -1])
    steps = signed * 256 ** (points.num_parts - 1)
    for part in range(points.num_parts - 1):
        steps = steps + parts[:, part] * 256**part
    return steps.float() * points.steps.repeat_interleave(32, dim=1)


def randn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("is_fixed_point", [False, True])
@pytest.mark.parametrize(
    ("dtype", "num_heads", "num_kv_heads", "head_dim", "has_norms", "has_sinks", "window", "lengths"),
    [
        (torch.float32, 6, 2, 64, True, False, None, [100]),
        (torch.float32, 4, 4, 64, False, True, 40, [1, 33, 0, 160]),
        (torch.float16, 5, 1, 128, False, False, None, [32, 7]),
        pytest.param(torch.bfloat16, 24, 8, 128, False, False, None, [133], marks=pytest.mark.gpu),
        pytest.param(torch.bfloat16, 64, 8, 64, False, True, 128, [159, 0], marks=pytest.mark.gpu),
        pytest.param(torch.bfloat16, 32, 4, 128, True, False, None, [8000], marks=pytest.mark.gpu),
        pytest.param(
            torch.bfloat16, 32, 8, 128, False, False, None, [2047, 0, 900, 33], marks=pytest.mark.gpu
        ),
    ],
)
def test_stores_and_attends(
    interpreter: ProcessPoolExecutor,
    device: str,
    is_fixed_point: bool,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_norms: bool,
    has_sinks: bool,
    window: int | None,
    lengths: list[int],
):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies bfloat16 matrices wrongly")
    num_tokens, num_table_blocks = len(lengths), max(10, -(-max(lengths) // BLOCK_SIZE))
    num_blocks = num_tokens * num_table_blocks
    sizes = (num_heads, num_kv_heads, num_kv_heads)
    qkv = randn(num_tokens, sum(sizes), head_dim, dtype=dtype, seed=1)
    pools = [randn(num_blocks, BLOCK_SIZE, num_kv_heads, head_dim, dtype=dtype, seed=s) for s in (2, 3)]
    ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(4)).int()
    tables = ids.view(num_tokens, -1)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    positions = (seq_lens - 1).clamp(min=0)
    slots = torch.tensor(
        [
            int(tables[i, (n - 1) // BLOCK_SIZE]) * BLOCK_SIZE + (n - 1) % BLOCK_SIZE if n else -1
            for i, n in enumerate(lengths)
        ]
    )
    position = torch.arange(num_table_blocks * BLOCK_SIZE)
    angles = position[:, None] * 100.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    norms = (1 + randn(head_dim, dtype=dtype, seed=5) / 8, 1 + randn(head_dim, dtype=dtype, seed=6) / 8)
    sinks = randn(num_heads, dtype=dtype, seed=7) if has_sinks else None

    expected_pools = [pool.clone() for pool in pools]
    q, k, v = qkv.split(sizes, dim=1)
    k_pool, v_pool = expected_pools
    if has_norms:
        rotated = reference.norm_rope_store_kv(
            q, k, v, *norms, 1e-6, positions, cos_sin, k_pool, v_pool, slots
        )
    else:
        rotated = reference.rope_store_kv(q, k, v, positions, cos_sin, k_pool, v_pool, slots)
    query_start = torch.tensor([0, *(seq_lens > 0).int().cumsum(0).tolist()], dtype=torch.int32)
    expected = torch.zeros(num_tokens, num_heads, head_dim)
    for i, length in enumerate(lengths):  # one by one: padding stands between them here
        if length:
            alone = torch.tensor([0, 1], dtype=torch.int32)
            expected[i] = reference.paged_attention(
                rotated[i : i + 1],
                k_pool,
                v_pool,
                block_tables=tables[i : i + 1],
                seq_lens=seq_lens[i : i + 1],
                query_start=alone,
                cos_sin=cos_sin,
                scale=0.3,
                sinks=sinks,
                window=window,
            ).float()[0]
    assert query_start[-1] > 0

    heads = token_attention.Heads(
        scale=0.3, window=window, sinks=sinks, norms=norms if has_norms else None, eps=1e-6
    )
    arguments = (qkv, sizes, heads, (*pools, slots, tables, seq_lens, cos_sin), device, is_fixed_point)
    if device == "cuda":
        actual, *actual_pools = attended(*arguments)
    else:
        actual, *actual_pools = interpreter.submit(attended, *arguments).result(timeout=120)
    for pool, expected_pool in zip(actual_pools, expected_pools, strict=True):
        torch.testing.assert_close(pool, expected_pool, rtol=2 * TOLERANCE[dtype], atol=TOLERANCE[dtype])
    error = (actual - expected.flatten(1)).abs().max()
    assert error <= TOLERANCE[dtype] * float(expected.abs().max())


def attended(
    qkv: Tensor,
    sizes: tuple[int, ...],
    heads: token_attention.Heads,
    tensors: tuple[Tensor, ...],
    device: str,
    is_fixed_point: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers of `attend` or `attend_to_points`, twice: the second launch finds what the first has
    left; and both pools."""
    q, k, v = qkv.to(device).split(sizes, dim=1)
    k_pool, v_pool, slots, tables, seq_lens, cos_sin = (tensor.to(device) for tensor in tensors)
    if heads.sinks is not None:
        heads = replace(heads, sinks=heads.sinks.to(device))
    if heads.norms is not None:
        heads = replace(heads, norms=(heads.norms[0].to(device), heads.norms[1].to(device)))
    assert token_attention.can_attend(len(q), q.shape[1], q.shape[2], q.dtype, k_pool, tables)

    def once() -> Tensor:
        arguments = (q, k, v, heads, k_pool, v_pool, slots, tables, seq_lens, cos_sin)
        if is_fixed_point:
            return value_of(token_attention.attend_to_points(*arguments))
        return token_attention.attend(*arguments).float()

    first, second = once(), once()
    assert torch.equal(first, second)
    return second.cpu(), k_pool.cpu(), v_pool.cpu()
