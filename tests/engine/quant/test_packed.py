"""Packed matrices against GGUF's own unpacking, and the products with them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine.kernels import quantized_linear, quantized_moe
from dayshift.engine.quant import packed as packed_module
from dayshift.engine.quant.dequantize import BLOCK_TYPES, dequantize
from dayshift.engine.quant.packed import PackedMatrix, below, pack, packed_bytes, unpack
from tests.engine.quant.test_dequantize import random_rows

Q = GGMLQuantizationType


@pytest.mark.parametrize("quant_type", BLOCK_TYPES, ids=lambda quant_type: quant_type.name)
@given(num_rows=st.integers(1, 4), num_blocks=st.integers(1, 5), seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_packed_weights_are_the_files(quant_type: Q, num_rows: int, num_blocks: int, seed: int) -> None:
    raw = torch.from_numpy(random_rows(quant_type, num_rows, num_blocks, seed))
    expected = dequantize(raw, quant_type)
    assert torch.equal(unpack(pack(raw, quant_type)).view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("quant_type", BLOCK_TYPES, ids=lambda quant_type: quant_type.name)
def test_packing_in_parts_and_experts(quant_type: Q, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.from_numpy(random_rows(quant_type, 6, 3, seed=1)).view(2, 3, -1)
    monkeypatch.setattr(packed_module, "_CHUNK_BLOCKS", 4)
    matrix = pack(raw, quant_type)
    assert torch.equal(unpack(matrix), dequantize(raw, quant_type))
    assert torch.equal(unpack(matrix.expert(1)), dequantize(raw[1], quant_type))


@pytest.mark.parametrize("num_experts", [None, 2])
def test_rows_of_two_matrices(num_experts: int | None) -> None:
    raw = torch.from_numpy(random_rows(Q.Q6_K, 10, 2, seed=1))
    upper, lower = (
        (raw[:4], raw[4:]) if num_experts is None else (raw[:4].view(2, 2, -1), raw[4:].view(2, 3, -1))
    )
    both = below(pack(upper, Q.Q6_K), pack(lower, Q.Q6_K))
    expected = torch.cat((dequantize(upper, Q.Q6_K), dequantize(lower, Q.Q6_K)), dim=-2)
    assert torch.equal(unpack(both), expected)


def test_sizes_are_those_of_the_document() -> None:
    grown = {Q.Q4_K: 148, Q.Q5_K: 180, Q.Q3_K: 114, Q.Q2_K: 100}
    for quant_type in BLOCK_TYPES:
        matrix = pack(torch.from_numpy(random_rows(quant_type, 2, 3, seed=1)), quant_type)
        assert matrix.num_bytes == packed_bytes(2 * matrix.num_columns, quant_type)
        assert matrix.num_bytes == 6 * grown.get(quant_type, GGML_QUANT_SIZES[quant_type][1])


def test_products() -> None:
    def experts(num_rows: int) -> tuple[PackedMatrix, torch.Tensor]:
        raw = torch.from_numpy(random_rows(Q.Q8_0, 2 * num_rows, 1, seed=num_rows)).view(2, num_rows, -1)
        return pack(raw, Q.Q8_0), dequantize(raw, Q.Q8_0)

    (gate_up, gate_up_weights), (down, down_weights) = experts(64), experts(32)
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    of_expert = gate_up.expert(1)
    torch.testing.assert_close(
        quantized_linear(x, (of_expert, of_expert)).chunk(2, dim=1)[1], x @ gate_up_weights[1].T
    )
    expert_ids, weights = torch.tensor([[1, 0], [0, 1]]), torch.tensor([[0.5, 0.5], [0.9, 0.1]])
    expected = torch.zeros(2, 32)
    for token, pick in ((0, 0), (0, 1), (1, 0), (1, 1)):
        expert = expert_ids[token, pick]
        gate, up = (gate_up_weights[expert] @ x[token]).chunk(2)
        expected[token] += weights[token, pick] * (down_weights[expert] @ (F.silu(gate) * up))
    actual = quantized_moe(x, weights, expert_ids, (gate_up,), down, None, None, "silu")
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
