"""Gated activations of rows whose norm is due: the kernel against torch, torch against a norm before."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dayshift.policy.smolvla.row_norm import RowNorm, gate_rows_torch, gate_rows_triton

GateRows = Callable[[Tensor, RowNorm], Tensor]


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def gate_rows(request: pytest.FixtureRequest) -> GateRows:
    """`gate_rows_triton` on CPU tensors."""
    if request.param == "interpreter":
        executor: ProcessPoolExecutor = request.getfixturevalue("interpreter")
        return lambda *args: executor.submit(gate_rows_triton, *args).result(timeout=120)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return lambda gate_up, norm: gate_rows_triton(gate_up.cuda(), RowNorm(norm.x.cuda(), norm.eps)).cpu()


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "size", "norm_size"), [((2, 3), 1100, 100), ((5,), 16, 720), ((1, 1), 7, 3)]
)
def test_the_kernel_gates_as_torch_does(
    gate_rows: GateRows, rows: tuple[int, ...], size: int, norm_size: int, dtype: torch.dtype
):
    gate_up = randn(*rows, 2 * size, seed=1).to(dtype)
    norm = RowNorm(2 * randn(*rows, norm_size, seed=2).to(dtype), 1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    actual = gate_rows(gate_up, norm)
    assert actual.shape == (*rows, size)
    torch.testing.assert_close(actual, gate_rows_torch(gate_up, norm), atol=tolerance, rtol=tolerance)


def test_a_norm_that_is_due_is_the_one_before_the_product():
    x, weight = randn(4, 20, seed=3), randn(12, 20, seed=4)
    gate, up = (F.rms_norm(x, (20,), eps=1e-5) @ weight.T).chunk(2, dim=-1)
    actual = gate_rows_torch(x @ weight.T, RowNorm(x, 1e-5))
    torch.testing.assert_close(actual, F.silu(gate) * up, atol=1e-5, rtol=1e-5)
