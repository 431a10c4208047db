"""Products with packed matrices: Triton against the torch twins, for every quantised format."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from dayshift.engine.kernels import quantized, reference
from dayshift.engine.quant.dequantize import BLOCK_TYPES
from dayshift.engine.quant.packed import PackedMatrix, pack
from tests.engine.quant.test_dequantize import random_rows
from tests.engine.test_kernels_triton import interpreter as interpreter

Compute = Callable[..., torch.Tensor]
# Relative to the largest value. Sums are float32 in both, but in another order.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
every_type = pytest.mark.parametrize("quant_type", BLOCK_TYPES, ids=lambda quant_type: quant_type.name)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def compute(request: pytest.FixtureRequest) -> Compute:
    """`compute(kernel, *args)`: what the kernel gives, on the CPU."""
    if request.param == "interpreter":
        executor: ProcessPoolExecutor = request.getfixturevalue("interpreter")
        return lambda kernel, *args: executor.submit(kernel, *args).result(timeout=120)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return lambda kernel, *args: kernel(*map(to_gpu, args)).cpu()


def to_gpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, PackedMatrix):
        names = ("low", "high", "scales", "minimums", "group_scales", "group_minimums")
        planes = {name: getattr(value, name) for name in names}
        return replace(
            value, **{name: None if plane is None else plane.cuda() for name, plane in planes.items()}
        )
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
    assert_close(compute(quantized.quantized_linear, x, matrix), reference.quantized_linear(x, matrix))


@every_type
def test_many_tokens_take_the_unpacked_matrix(compute: Compute, quant_type: GGMLQuantizationType):
    matrix = make_matrix(quant_type, num_rows=3, least_columns=300)
    weights = compute(quantized.dequantize_packed, matrix, torch.float32)
    assert_close(weights, reference.dequantize_packed(matrix, torch.float32))  # a GPU fuses scale and minimum
    x = randn(quantized.MAX_TOKENS + 1, matrix.num_columns)
    assert_close(compute(quantized.quantized_linear, x, matrix), reference.quantized_linear(x, matrix))


@pytest.mark.parametrize("num_tokens", [0, 5, 11, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tiles_of_tokens(compute: Compute, num_tokens: int, dtype: torch.dtype):
    matrix = make_matrix(GGMLQuantizationType.Q4_1, num_rows=5, least_columns=200)
    x = randn(num_tokens, 2 * matrix.num_columns, dtype=dtype)[:, : matrix.num_columns]  # strided
    assert_close(compute(quantized.quantized_linear, x, matrix), reference.quantized_linear(x, matrix))


@every_type
def test_experts(compute: Compute, quant_type: GGMLQuantizationType):
    matrix = make_matrix(quant_type, num_rows=5, least_columns=300, num_experts=3)
    expert_ids = torch.tensor([[2, 0], [1, 2], [2, 1]])
    for num_inputs in (3, 6):  # the same input for all experts of a token, or one for each
        x = randn(num_inputs, matrix.num_columns)
        actual = compute(quantized.quantized_experts, x, expert_ids, matrix)
        assert_close(actual, reference.quantized_experts(x, expert_ids, matrix))


def test_a_token_does_not_depend_on_its_neighbours(compute: Compute):
    matrix = make_matrix(GGMLQuantizationType.Q5_K, num_rows=6, least_columns=1500)
    x = randn(8, matrix.num_columns)
    together = compute(quantized.quantized_linear, x, matrix)
    for num_tokens in (1, 2, 5):
        assert torch.equal(compute(quantized.quantized_linear, x[:num_tokens], matrix), together[:num_tokens])


@pytest.mark.gpu
@every_type
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 64])
def test_sizes_of_real_models(quant_type: GGMLQuantizationType, num_tokens: int):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    matrix = to_gpu(make_matrix(quant_type, num_rows=1024, least_columns=2880))
    x = randn(num_tokens, matrix.num_columns, dtype=torch.bfloat16).cuda()
    expected = reference.quantized_linear(x.float(), matrix).bfloat16()
    assert_close(quantized.quantized_linear(x, matrix), expected)
