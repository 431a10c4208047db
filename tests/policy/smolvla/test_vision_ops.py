"""Residual sums with layer norms, and products with their activation: one launch each against torch."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dayshift.policy.smolvla.layer_norm import add_layer_norm_torch, add_layer_norm_triton
from dayshift.policy.smolvla.vision import linear_gelu

AddNorm = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def add_norm(request: pytest.FixtureRequest) -> AddNorm:
    """`add_layer_norm_triton` on CPU tensors; the first is written in place."""
    if request.param == "interpreter":
        executor: ProcessPoolExecutor = request.getfixturevalue("interpreter")
        return lambda *args: executor.submit(add_layer_norm_triton, *args).result(timeout=300)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def on_gpu(hidden: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        on_device = hidden.cuda()
        y = add_layer_norm_triton(on_device, delta.cuda(), weight.cuda(), bias.cuda(), eps)
        hidden.copy_(on_device)
        return y.cpu()

    return on_gpu


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(2, 5, 768), (1, 3, 100), (7, 4, 16)])
def test_the_kernel_sums_and_norms_as_torch_does(
    add_norm: AddNorm, shape: tuple[int, ...], dtype: torch.dtype
):
    hidden, delta = randn(*shape, seed=1).to(dtype) + 3, randn(*shape, seed=2).to(dtype)
    weight, bias = randn(shape[-1], seed=3).to(dtype), randn(shape[-1], seed=4).to(dtype)
    summed, wanted_sum = hidden.clone(), hidden.clone()
    actual = add_norm(summed, delta, weight, bias, 1e-6)
    wanted = add_layer_norm_torch(wanted_sum, delta, weight, bias, 1e-6)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2  # some roundings of the result
    torch.testing.assert_close(summed, wanted_sum, atol=0, rtol=0)
    torch.testing.assert_close(actual, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 5, 768), (64, 1024, 768)])
def test_the_activation_inside_a_product_is_the_one_by_tanh(shape: tuple[int, ...]):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    linear = nn.Linear(shape[-1], 4 * shape[-1]).cuda()
    x = randn(*shape, seed=1).cuda()
    with torch.inference_mode():
        wanted = F.gelu(linear(x), approximate="tanh")
        torch.testing.assert_close(linear_gelu(linear, x), wanted, atol=2e-3, rtol=2e-3)
        erf = F.gelu(linear(x))
        half = linear.bfloat16()
        actual = linear_gelu(half, x.bfloat16()).float()
    assert (actual - wanted).abs().max() < 3e-2
    assert (wanted - erf).abs().max() > 1e-5  # the two differ, so the first comparison tells them apart
