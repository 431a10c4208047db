"""Norm and router of some tokens in CUDA C++: on a GPU against their torch twin, and compiled without one."""

import pytest
import torch

from dayshift.engine.kernels import reference, routing, token_router
from tests.engine.compiled_kernels import NUM_PROCESSORS, named_gpu
from tests.engine.cuda_kernels import CudaLaunch, cuda_launches, machine_code_of, resources_of
from tests.engine.test_kernels_triton import assert_close, randn

BF16, FP16 = torch.bfloat16, torch.float16
PROCESSOR_REGISTERS = 65_536


def operands(
    num_tokens: int, num_experts: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, residual, norm_weight and router."""
    return (
        randn(num_tokens, size, dtype=dtype),
        randn(num_tokens, size, dtype=dtype, seed=1),
        1 + randn(size, dtype=torch.float32, seed=2) / 8,
        randn(num_experts, size, dtype=dtype, seed=3) / size**0.5,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "size"),
    [(17, 128, 2048), (32, 128, 2048), (33, 128, 2048), (128, 128, 2048), (17, 48, 768), (20, 16, 256)],
)
def test_routes(num_tokens: int, num_experts: int, size: int, dtype: torch.dtype):
    x, residual, norm_weight, router = operands(num_tokens, num_experts, size, dtype)
    expected = reference.norm_router(x, residual, norm_weight, 1e-5, router)
    on_gpu = x.cuda(), residual.cuda(), norm_weight.cuda()
    assert token_router.can_route(*on_gpu, router.cuda())
    token_router.route(*on_gpu, 1e-5, router.cuda())
    actual = token_router.route(*on_gpu, 1e-5, router.cuda())  # begins while the first ends
    for one, other in zip(actual, expected, strict=True):
        assert_close(one.cpu(), other)


@pytest.mark.gpu
def test_slices_of_wider_tensors():
    x, residual, norm_weight, router = operands(20, 32, 1024, BF16)
    wide = torch.stack([x, residual], 1).cuda()
    x, residual = wide[:, 0], wide[:, 1]
    actual = token_router.route(x, residual, norm_weight.cuda(), 1e-5, router.cuda())
    expected = reference.norm_router(x.cpu(), residual.cpu(), norm_weight, 1e-5, router)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one.cpu(), other)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("num_tokens", [17, 100, 128])
def test_compiles(num_tokens: int, dtype: torch.dtype, capability: int):
    launch = launch_of(num_tokens, dtype, capability)
    resources = resources_of(launch.kernel, f"sm_{capability}a")
    assert resources.stack_bytes == 0
    assert launch.num_programs <= NUM_PROCESSORS[capability]
    assert launch.num_threads * resources.registers <= PROCESSOR_REGISTERS


@pytest.mark.parametrize("capability", [90, 100])
def test_the_next_kernel_begins_after_this_one_has_waited(capability: int):
    """It may read, without a wait of its own, what was written before."""
    code = machine_code_of(launch_of(32, BF16, capability).kernel, f"sm_{capability}a")
    assert [name for name in code if name in ("ACQBULK", "PREEXIT")] == ["ACQBULK", "PREEXIT"]


def launch_of(num_tokens: int, dtype: torch.dtype, capability: int) -> CudaLaunch:
    """What the router of Qwen3-30B-A3B launches on such a GPU."""
    x, residual, norm_weight, router = operands(num_tokens, 128, 2048, dtype)
    with named_gpu(capability), cuda_launches(capability) as launches:
        routing.norm_router(x, residual, norm_weight, 1e-5, router)
    (launch,) = launches
    return launch


def test_other_tensors_are_for_others():
    x, residual, norm_weight, router = operands(32, 128, 2048, BF16)
    with named_gpu(90):
        assert token_router.can_route(x, residual, norm_weight, router)
        assert not token_router.can_route(x[:16], residual[:16], norm_weight, router)
        assert not token_router.can_route(x.float(), residual, norm_weight, router)
        assert not token_router.can_route(x, residual, norm_weight.bfloat16(), router)
        assert not token_router.can_route(x, residual, norm_weight, router[:20])
        assert not token_router.can_route(x[:, 1:], residual[:, 1:], norm_weight[1:], router[:, 1:])
        assert not token_router.can_route(x.T.contiguous().T, residual, norm_weight, router)
    with named_gpu(89):
        assert not token_router.can_route(x, residual, norm_weight, router)
