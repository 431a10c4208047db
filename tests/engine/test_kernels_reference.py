"""The torch twins against the formulas in float64, written out naively."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine.kernels import (
    copy_blocks,
    gated_activation,
    gather_kv,
    paged_attention,
    reference,
    rms_norm,
    rope,
    rope_store_kv,
    scatter_kv,
    silu_mul,
    store_kv,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Relative to the largest value: a few units in the last place of the dtype.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs().max() if actual.numel() else 0.0
    assert error <= TOLERANCE[actual.dtype] * max(1.0, float(expected.abs().max()))


def cos_sin_table(num_positions: int, head_dim: int, base: float = 10000.0) -> torch.Tensor:
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


def rotate_by_complex(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotation in the complex plane: (x1 + i x2) · (cos + i sin), in float64."""
    half = x.shape[-1] // 2
    angles = table.double()[positions]
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.complex(
        angles[:, :half], angles[:, half:]
    ).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """One query and one head at a time, in float64; the queries are the last tokens."""
    num_queries, num_heads, _ = q.shape
    seq_len, num_kv_heads, _ = k.shape
    out = torch.empty(q.shape, dtype=torch.float64)
    for i in range(num_queries):
        num_keys = seq_len - num_queries + i + 1
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            first = 0 if window is None else max(0, num_keys - window)
            scores = k[first:num_keys, kv_head].double() @ q[i, head].double() * scale
            sink = 0.0 if sinks is None else sinks[head].double().exp()
            weights = scores.exp() / (scores.exp().sum() + sink)
            out[i, head] = weights @ v[first:num_keys, kv_head].double()
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 50), (5, 2, 16)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype):
    x, weight, residual = (
        randn(*shape, dtype=dtype),
        randn(shape[-1], dtype=dtype, seed=1),
        randn(*shape, seed=2),
    )
    y = rms_norm(x, weight, 1e-5)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert y.dtype == dtype
    assert_close(y, expected)

    y, summed = rms_norm(x, weight, 1e-5, residual.to(dtype))
    assert torch.equal(summed, x + residual.to(dtype))
    assert torch.equal(y, rms_norm(summed, weight, 1e-5))


def test_rms_norm_reads_a_view_of_packed_heads():
    packed = randn(4, 5 * 8)
    heads = packed[:, 8:32].unflatten(1, (3, 8))
    weight = randn(8, seed=1)
    assert torch.equal(rms_norm(heads, weight, 1e-6), rms_norm(heads.clone(), weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2), (7, 3, 10), (4, 2, 64)])
def test_rope(shape: tuple[int, int, int], dtype: torch.dtype):
    x, positions, table = (
        randn(*shape, dtype=dtype),
        torch.arange(shape[0]) * 13,
        cos_sin_table(100, shape[2]),
    )
    y = rope(x, positions, table)
    assert y.dtype == dtype
    assert_close(y, rotate_by_complex(x, positions, table))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations(dtype: torch.dtype):
    gate_up = 4 * randn(3, 22, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    assert_close(silu_mul(gate_up), gate / (1 + (-gate).exp()) * up)
    tanh = (0.7978845608028654 * (gate + 0.044715 * gate**3)).tanh()
    assert_close(gated_activation(gate_up, "gelu_tanh"), gate * (1 + tanh) / 2 * up)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    assert_close(gated_activation(gate_up, "clamped_swiglu"), gate / (1 + (-1.702 * gate).exp()) * (up + 1))


@given(data=st.data(), num_blocks=st.integers(1, 5), block_size=st.integers(1, 4))
@settings(deadline=None)
def test_stored_kv_lies_in_its_slots_and_nowhere_else(data: st.DataObject, num_blocks: int, block_size: int):
    pool_shape = (num_blocks, block_size, 2, 4)
    k_pool, v_pool = randn(*pool_shape, seed=1), randn(*pool_shape, seed=2)
    k_before, v_before = k_pool.clone(), v_pool.clone()
    slots = data.draw(st.lists(st.integers(0, num_blocks * block_size - 1), unique=True))
    slots += data.draw(st.lists(st.just(-1), max_size=3))
    slots = data.draw(st.permutations(slots))
    k, v = randn(len(slots), 2, 4, seed=3), randn(len(slots), 2, 4, seed=4)
    q, positions, table = randn(len(slots), 4, 4), torch.arange(len(slots)), cos_sin_table(32, 4)

    rotated = rope_store_kv(q, k, v, positions, table, k_pool, v_pool, torch.tensor(slots, dtype=torch.int64))

    assert torch.equal(rotated, rope(q, positions, table))
    for slot in range(num_blocks * block_size):
        index = divmod(slot, block_size)
        expected_k, expected_v = (
            (k[slots.index(slot)], v[slots.index(slot)])
            if slot in slots
            else (k_before[index], v_before[index])
        )
        assert torch.equal(k_pool[index], expected_k)
        assert torch.equal(v_pool[index], expected_v)


def test_store_kv_refuses_a_pool_that_would_be_copied():
    pool = torch.zeros(3, 4, 2, 8).transpose(0, 1)
    with pytest.raises(RuntimeError, match="view"):
        store_kv(randn(1, 2, 8), randn(1, 2, 8), pool, pool.clone(), torch.tensor([0]))


@given(data=st.data())
@settings(deadline=None)
def test_gathered_kv_scatters_back(data: st.DataObject):
    shape = (3, 4, 2, 2, 4)  # layers, blocks, block size, heads, head_dim
    slots = torch.tensor(data.draw(st.lists(st.integers(0, 7), unique=True)), dtype=torch.int64)
    k_pool, v_pool = randn(*shape, seed=1), randn(*shape, seed=2)
    k, v = gather_kv(k_pool, v_pool, slots)
    assert k.shape == v.shape == (3, len(slots), 2, 4)
    for position, slot in enumerate(slots.tolist()):
        assert torch.equal(k[:, position], k_pool[:, slot // 2, slot % 2])
    k_copy, v_copy = torch.zeros_like(k_pool), torch.zeros_like(v_pool)
    scatter_kv(k, v, k_copy, v_copy, slots)
    assert all(torch.equal(a, b) for a, b in zip(gather_kv(k_copy, v_copy, slots), (k, v), strict=True))
    assert int(k_copy.count_nonzero()) == k.numel()


def test_copy_blocks_reads_all_sources_before_it_writes():
    k_pool, v_pool = randn(2, 4, 2, 1, 4, seed=1), randn(2, 4, 2, 1, 4, seed=2)
    k_before, v_before = k_pool.clone(), v_pool.clone()
    copy_blocks(k_pool, v_pool, torch.tensor([0, 1, 0]), torch.tensor([1, 0, 3]))
    assert torch.equal(k_pool, k_before[:, [1, 0, 2, 0]])
    assert torch.equal(v_pool, v_before[:, [1, 0, 2, 0]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 8), (6, 2, 10), (3, 1, 16)])
def test_paged_attention(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype):
    block_size, table, scale = 4, cos_sin_table(64, head_dim), 0.3
    seq_lens, num_queries = [1, 13, 0, 8, 30], [1, 5, 1, 8, 1]  # decode, chunk, padding, prefill, decode
    k_pool = randn(48, block_size, num_kv_heads, head_dim, dtype=dtype, seed=1)
    v_pool = randn(48, block_size, num_kv_heads, head_dim, dtype=dtype, seed=2)
    block_tables = torch.randperm(48, generator=torch.Generator().manual_seed(0))[: 5 * 8].view(5, 8).int()
    query_start = torch.tensor([0, *num_queries]).cumsum(0).int()
    q = randn(sum(num_queries), num_heads, head_dim, dtype=dtype, seed=3)

    def attend(rows: list[int]) -> list[torch.Tensor]:
        """The results of some sequences, attended as one batch."""
        queries = [q[query_start[row] : query_start[row + 1]] for row in rows]
        starts = torch.tensor([0, *(len(query) for query in queries)]).cumsum(0).int()
        lens = torch.tensor([seq_lens[row] for row in rows]).int()
        tables = block_tables[rows]
        out = paged_attention(torch.cat(queries), k_pool, v_pool, tables, lens, starts, table, scale)
        return list(out.split([len(query) for query in queries]))

    batch = attend([0, 1, 2, 3, 4])
    for row, (seq_len, result) in enumerate(zip(seq_lens, batch, strict=True)):
        assert result.dtype == dtype
        if seq_len == 0:
            assert not result.any()
            continue
        slots = (block_tables[row].long().unsqueeze(1) * block_size + torch.arange(block_size)).flatten()
        raw_k, v = gather_kv(k_pool, v_pool, slots[:seq_len])
        k = rotate_by_complex(raw_k, torch.arange(seq_len), table)
        queries = q[query_start[row] : query_start[row + 1]]
        assert_close(result, naive_attention(queries, k, v, scale))
        assert torch.equal(result, attend([row])[0])


@pytest.mark.parametrize("num_queries", [1, 23, 61])
@pytest.mark.parametrize("has_sinks", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7, 50, 100])
def test_attention_with_sinks_and_windows(
    num_queries: int, has_sinks: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reference, "_QUERY_TILE", 16)
    seq_len, head_dim = 61, 8
    k_pool, v_pool = randn(16, 4, 2, head_dim, seed=1), randn(16, 4, 2, head_dim, seed=2)
    q, table = randn(num_queries, 6, head_dim), cos_sin_table(64, head_dim)
    sinks = 2 * randn(6, seed=3) if has_sinks else None
    out = paged_attention(
        q,
        k_pool,
        v_pool,
        block_tables=torch.arange(16).flip(0).view(1, 16).int(),
        seq_lens=torch.tensor([seq_len]),
        query_start=torch.tensor([0, num_queries]),
        cos_sin=table,
        scale=0.3,
        sinks=sinks,
        window=window,
    )
    keys, values = (pool.flip(0).flatten(0, 1)[:seq_len] for pool in (k_pool, v_pool))
    rotated = rotate_by_complex(keys, torch.arange(seq_len), table)
    assert_close(out, naive_attention(q, rotated, values, 0.3, sinks, window))


def test_attention_in_query_tiles_equals_one_tile(monkeypatch: pytest.MonkeyPatch):
    k_pool, v_pool = randn(8, 4, 1, 8, seed=1), randn(8, 4, 1, 8, seed=2)
    q, block_tables = randn(11, 2, 8), torch.arange(8).view(1, 8).int()
    arguments = (
        q,
        k_pool,
        v_pool,
        block_tables,
        torch.tensor([30]),
        torch.tensor([0, 11]),
        cos_sin_table(32, 8),
        1.0,
    )
    whole = paged_attention(*arguments)
    monkeypatch.setattr(reference, "_QUERY_TILE", 4)
    assert_close(paged_attention(*arguments), whole.double())
