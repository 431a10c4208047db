"""The vision tower: norms of sums without their biases, and products with their activation."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dayshift.policy.smolvla.config import VisionConfig
from dayshift.policy.smolvla.layer_norm import offset_layer_norm_torch, offset_layer_norm_triton
from dayshift.policy.smolvla.vision import VisionLayer, VisionTower, linear_gelu

OffsetNorm = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def offset_norm(request: pytest.FixtureRequest) -> OffsetNorm:
    """`offset_layer_norm_triton` on CPU tensors."""
    if request.param == "interpreter":
        executor: ProcessPoolExecutor = request.getfixturevalue("interpreter")
        return lambda *args: executor.submit(offset_layer_norm_triton, *args).result(timeout=300)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def on_gpu(hidden: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return offset_layer_norm_triton(hidden.cuda(), offset.cuda(), weight.cuda(), bias.cuda(), eps).cpu()

    return on_gpu


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(2, 5, 768), (1, 3, 100), (7, 4, 16)])
def test_the_kernel_norms_the_sum_as_torch_does(
    offset_norm: OffsetNorm, shape: tuple[int, ...], dtype: torch.dtype
):
    hidden, offset = randn(*shape, seed=1).to(dtype) + 3, randn(shape[-1], seed=2) - 1
    weight, bias = randn(shape[-1], seed=3).to(dtype), randn(shape[-1], seed=4).to(dtype)
    actual = offset_norm(hidden, offset, weight, bias, 1e-6)
    wanted = offset_layer_norm_torch(hidden, offset, weight, bias, 1e-6)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2  # some roundings of the result
    torch.testing.assert_close(actual, wanted, atol=tolerance, rtol=tolerance)


def test_the_tower_is_the_one_with_every_bias_in_its_place():
    """Against a residual sum that adds each bias where it arises."""
    config = VisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
    )
    torch.manual_seed(0)
    tower = VisionTower(config, patch_grid=4).double()
    images = randn(2, 3, 16, 16, seed=1).double()
    with torch.inference_mode():
        hidden = tower.patch_embedding(images).flatten(2).transpose(1, 2) + tower.position_embedding.weight
        for layer in tower.layers:
            assert isinstance(layer, VisionLayer)
            parts = layer.qkv_proj(layer.layer_norm1(hidden)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
            hidden = hidden + layer.out_proj(attended)
            inner = F.gelu(layer.fc1(layer.layer_norm2(hidden)), approximate="tanh")
            hidden = hidden + layer.fc2(inner)
        patches = F.unfold(images, kernel_size=4, stride=4).transpose(1, 2)
        actual, wanted = tower(patches), tower.post_layernorm(hidden)
    torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)  # norms are computed in float32


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
