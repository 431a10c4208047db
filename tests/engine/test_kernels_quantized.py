"""Products with packed matrices: Triton against the torch twins, for every quantised format."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from dayshift.engine.kernels import quantized, quantized_inputs, quantized_products
from dayshift.engine.kernels import reference_quantized as reference
from dayshift.engine.models.config import Activation
from dayshift.engine.quant.dequantize import BLOCK_TYPES
from dayshift.engine.quant.packed import PackedMatrix, pack, unpack
from tests.engine.quant.test_dequantize import random_rows
from tests.engine.test_kernels_triton import interpreter as interpreter

Compute = Callable[..., Any]
# Relative to the largest value. Sums are float32 in both, but in another order.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
every_type = pytest.mark.parametrize("quant_type", BLOCK_TYPES, ids=lambda quant_type: quant_type.name)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def compute(request: pytest.FixtureRequest) -> Compute:
    """`compute(kernel, *args)`: what the kernel gives, on the CPU."""
    if request.param == "interpreter":
        executor: ProcessPoolExecutor = request.getfixturevalue("interpreter")
        return lambda kernel, *args: executor.submit(kernel, *args).result(timeout=300)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return lambda kernel, *args: to_device(kernel(*to_device(args, "cuda")), "cpu")


def to_device(value: Any, device: str) -> Any:
    """A value with all of its tensors there."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(to_device(item, device) for item in value)
    if isinstance(value, PackedMatrix | quantized_products.Picks):
        parts = {field.name: to_device(getattr(value, field.name), device) for field in fields(value)}
        return replace(value, **parts)
    return value


def make_matrix(
    quant_type: GGMLQuantizationType, num_rows: int, least_columns: int, num_experts: int | None = None
) -> PackedMatrix:
    num_blocks = -(-least_columns // GGML_QUANT_SIZES[quant_type][0])
    raw = torch.from_numpy(random_rows(quant_type, num_rows * (num_experts or 1), num_blocks, seed=3))
    if quant_type == GGMLQuantizationType.MXFP4:  # exponents of any size would drown all other weights
        raw.view(-1, 17)[:, 0] = raw.view(-1, 17)[:, 0] % 8 + 120
    return pack(raw if num_experts is None else raw.view(num_experts, num_rows, -1), quant_type)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    if actual.numel():
        error = (actual.double() - expected.double()).abs().max()
        assert error <= TOLERANCE[actual.dtype] * float(expected.abs().max())


@every_type
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_few_tokens(compute: Compute, quant_type: GGMLQuantizationType, num_tokens: int):
    matrix = make_matrix(quant_type, num_rows=6, least_columns=1300)  # not whole tiles
    x = randn(num_tokens, matrix.num_columns)
    assert_close(compute(quantized.quantized_linear, x, (matrix,)), reference.quantized_linear(x, (matrix,)))


@every_type
def test_many_tokens_take_the_unpacked_matrix(compute: Compute, quant_type: GGMLQuantizationType):
    matrix = make_matrix(quant_type, num_rows=3, least_columns=300)
    weights = compute(quantized.dequantize_packed, matrix, torch.float32)
    assert_close(weights, reference.dequantize_packed(matrix, torch.float32))  # a GPU fuses scale and minimum
    x = randn(quantized.MAX_TOKENS + 1, matrix.num_columns)
    assert_close(compute(quantized.quantized_linear, x, (matrix,)), reference.quantized_linear(x, (matrix,)))


@pytest.mark.parametrize("num_tokens", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tiles_of_tokens(compute: Compute, num_tokens: int, dtype: torch.dtype):
    matrix = make_matrix(GGMLQuantizationType.Q4_1, num_rows=5, least_columns=200)
    x = randn(num_tokens, 2 * matrix.num_columns, dtype=dtype)[:, : matrix.num_columns]  # strided
    assert_close(compute(quantized.quantized_linear, x, (matrix,)), reference.quantized_linear(x, (matrix,)))


def test_parts_of_several_types_with_a_bias(compute: Compute):
    matrices = tuple(make_matrix(t, 5, 300) for t in (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K))
    x, bias = randn(2, matrices[0].num_columns, dtype=torch.bfloat16), randn(10, dtype=torch.bfloat16)
    for num_tokens in (2, 0):
        actual = compute(quantized.quantized_linear, x[:num_tokens], matrices, bias)
        assert_close(actual, reference.quantized_linear(x[:num_tokens], matrices, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [2, quantized.MAX_TOKENS + 1])
def test_norm_in_front(compute: Compute, num_tokens: int, dtype: torch.dtype):
    matrix = make_matrix(GGMLQuantizationType.Q5_1, num_rows=5, least_columns=160)
    x, residual = randn(num_tokens, 2 * 160, dtype=dtype)[:, :160], 3 * randn(num_tokens, 160, dtype=dtype)
    args = x, residual, randn(160, dtype=dtype), 1e-6, (matrix,), randn(5, dtype=dtype)
    actual, summed = compute(quantized.quantized_norm_linear, *args)
    expected, expected_sum = reference.quantized_norm_linear(*args)
    assert_close(actual, expected)
    assert_close(summed, expected_sum)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("num_matrices", [1, 2])
def test_gated_activation_behind(compute: Compute, num_matrices: int, kind: Activation):
    types = (GGMLQuantizationType.Q3_K, GGMLQuantizationType.Q2_K)[:num_matrices]
    gate_up = tuple(make_matrix(t, 10 // num_matrices, 300) for t in types)
    x = randn(2, gate_up[0].num_columns) / 8
    args = x, x, randn(1, x.shape[1])[0], 1e-6, gate_up, kind
    actual, summed = compute(quantized.quantized_norm_gated_linear, *args)
    assert_close(actual, reference.quantized_norm_gated_linear(*args)[0])
    assert_close(summed, x + x)


def product_of_picks(x: torch.Tensor, picks: quantized_products.Picks, matrix: PackedMatrix) -> torch.Tensor:
    num_outputs = len(picks.weights) if picks.is_summed else picks.weights.numel()
    y = x.new_empty((num_outputs, matrix.num_rows))
    quantized_products.multiply(quantized_inputs.fixed_point(x), matrix, y, picks=picks)
    return y


@every_type
@pytest.mark.parametrize("is_summed", [False, True])
def test_picks(compute: Compute, quant_type: GGMLQuantizationType, is_summed: bool):
    matrix = make_matrix(quant_type, num_rows=5, least_columns=300, num_experts=3)
    expert_ids, weights = torch.tensor([[2, 0, 1], [1, 2, 0]]), randn(2, 3)
    x = randn(6 if is_summed else 2, matrix.num_columns)
    actual = compute(product_of_picks, x, quantized_products.Picks(expert_ids, weights, is_summed), matrix)
    inputs = x if is_summed else x.repeat_interleave(3, dim=0)
    outs = torch.einsum("pc,prc->pr", inputs, unpack(matrix)[expert_ids.flatten()])
    assert_close(actual, torch.einsum("tpr,tp->tr", outs.view(2, 3, -1), weights) if is_summed else outs)


@pytest.mark.parametrize(("num_matrices", "has_bias"), [(1, True), (2, True), (1, False)])
def test_mixture(compute: Compute, num_matrices: int, has_bias: bool):
    types = (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0)[:num_matrices]
    gate_up = tuple(make_matrix(t, 64 // num_matrices, 32, num_experts=2) for t in types)
    down = make_matrix(GGMLQuantizationType.Q8_0, 32, 32, num_experts=2)
    x, weights, expert_ids = randn(1, 32, dtype=torch.bfloat16), randn(1, 2), torch.tensor([[1, 0]])
    biases = (randn(2, 64).bfloat16(), randn(2, 32).bfloat16()) if has_bias else (None, None)
    args: tuple[Any, ...] = (x, weights, expert_ids, gate_up, down, *biases, "clamped_swiglu")
    assert_close(compute(quantized.quantized_moe, *args), reference.quantized_moe(*args))


def test_a_token_does_not_depend_on_its_neighbours(compute: Compute):
    matrix = make_matrix(GGMLQuantizationType.Q5_K, num_rows=4, least_columns=1100)
    x = randn(6, matrix.num_columns)
    together = compute(quantized.quantized_linear, x, (matrix,))
    for num_tokens in (1, 2):
        alone = compute(quantized.quantized_linear, x[:num_tokens], (matrix,))
        assert torch.equal(alone, together[:num_tokens])


@pytest.mark.gpu
@every_type
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 64])
def test_sizes_of_real_models(quant_type: GGMLQuantizationType, num_tokens: int):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    matrix = to_device(make_matrix(quant_type, num_rows=1024, least_columns=2880), "cuda")
    x = randn(num_tokens, matrix.num_columns, dtype=torch.bfloat16).cuda()
    expected = reference.quantized_linear(x.float(), (matrix,)).bfloat16()
    assert_close(quantized.quantized_linear(x, (matrix,)), expected)
