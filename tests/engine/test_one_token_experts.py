"""Experts of one token in one launch: on a GPU against their torch twin, and compiled without one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dayshift.engine import kernels
from dayshift.engine.kernels import launch, moe, one_token_experts, reference
from dayshift.engine.kernels.one_token_experts import Sizes, ring_for
from dayshift.engine.models.config import Activation
from tests.engine.compiled_kernels import NUM_PROCESSORS, SHARED_MEMORY_BYTES, named_gpu
from tests.engine.cuda_kernels import CudaLaunch, cuda_launches, machine_code_of, resources_of
from tests.engine.test_kernels_triton import assert_close, randn

BF16, FP16 = torch.bfloat16, torch.float16
EPS = 1e-5
QWEN = Sizes(columns=2048, inner=768, num_experts=128, num_picked=8)
SIZES = [
    QWEN,
    Sizes(4096, 1536, 128, 8),  # more of down than fits into shared memory
    Sizes(4096, 2048, 64, 4),
    Sizes(256, 256, 32, 32),  # most programs have one row of down at most
    Sizes(512, 1280, 96, 1),  # no program has rows of two picks
]


def operands(sizes: Sizes, dtype: torch.dtype) -> dict[str, Any]:
    """All on the CPU. Logits are far enough apart that rounding does not change their order."""
    columns, inner, num_experts = sizes.columns, sizes.inner, sizes.num_experts
    x, residual = randn(1, columns, dtype=dtype), randn(1, columns, dtype=dtype, seed=1)
    norm = 1 + randn(columns, dtype=torch.float32, seed=2) / 8
    normed, _ = reference.rms_norm(x, norm, EPS, residual)
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(3))
    logits = (order - num_experts // 2) / 32
    router = logits[:, None] * normed.float() / normed.float().square().sum()
    return {
        "x": x,
        "residual": residual,
        "norm_weight": norm,
        "router": router.to(dtype),
        "gate_up": randn(num_experts, 2 * inner, columns, dtype=dtype, seed=4) / columns**0.5,
        "down": randn(num_experts, columns, inner, dtype=dtype, seed=5) / inner**0.5,
        "num_picked": sizes.num_picked,
    }


def on_gpu(made: dict[str, Any]) -> dict[str, Any]:
    return {name: item.cuda() if isinstance(item, torch.Tensor) else item for name, item in made.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("is_normalized", [False, True])
def test_mixes(sizes: Sizes, is_normalized: bool, dtype: torch.dtype):
    made = operands(sizes, dtype)
    expected = reference.norm_moe(**made, eps=EPS, is_normalized=is_normalized)
    moved = on_gpu(made)
    one_token_experts.mix(**moved, eps=EPS, is_normalized=is_normalized)
    actual = one_token_experts.mix(**moved, eps=EPS, is_normalized=is_normalized)  # begins while it ends
    for one, other in zip(actual, expected, strict=True):
        assert_close(one.cpu(), other)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["gelu_tanh", "clamped_swiglu"])
def test_mixes_with_a_bias_of_the_router_and_another_activation(activation: Activation):
    made = operands(Sizes(512, 256, 64, 4), BF16)
    made["router_bias"] = torch.linspace(-1, 3, 64).to(BF16)
    moved = on_gpu(made)
    actual = one_token_experts.mix(**moved, eps=EPS, is_normalized=True, activation=activation)
    expected = reference.norm_moe(**made, eps=EPS, is_normalized=True, activation=activation)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one.cpu(), other)


@pytest.mark.gpu
def test_of_equal_logits_the_first_experts_are_picked():
    made = operands(Sizes(512, 256, 64, 4), BF16)
    made["router"].zero_()
    actual, _ = one_token_experts.mix(**on_gpu(made), eps=EPS, is_normalized=True)
    normed, _ = reference.rms_norm(made["x"], made["norm_weight"], EPS, made["residual"])
    weights, picks = torch.full((1, 4), 0.25), torch.arange(4)[None]
    assert_close(actual.cpu(), reference.moe_mlp(normed, weights, picks, made["gate_up"], made["down"]))


@pytest.mark.gpu
def test_mixtures_in_a_row_wait_for_each_other():
    made = on_gpu(operands(QWEN, BF16))
    x = made.pop("x")
    del made["residual"]

    def layers() -> torch.Tensor:
        out, residual = x, x
        for _ in range(4):
            out, residual = one_token_experts.mix(out, residual, **made, eps=EPS, is_normalized=True)
        return out

    expected = layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers()
    for _ in range(50):
        graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_is_chosen_for_one_token():
    made = on_gpu(operands(Sizes(512, 256, 32, 4), BF16))
    major, _ = torch.cuda.get_device_capability()
    assert one_token_experts.can_mix(**made) == (major >= 9)
    x = made.pop("x")
    for down_bias in (None, torch.ones(32, 512, dtype=BF16, device="cuda")):
        expected = reference.norm_moe(x, **made, eps=EPS, is_normalized=True, down_bias=down_bias)
        actual = kernels.norm_moe(x, **made, eps=EPS, is_normalized=True, down_bias=down_bias)
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other)


def shaped(sizes: Sizes, dtype: torch.dtype) -> dict[str, Any]:
    """Operands whose values do not matter."""
    num_experts, columns = sizes.num_experts, sizes.columns
    return {
        "x": torch.empty(1, columns, dtype=dtype),
        "residual": torch.empty(1, columns, dtype=dtype),
        "norm_weight": torch.empty(columns),
        "router": torch.empty(num_experts, columns, dtype=dtype),
        "gate_up": torch.empty(num_experts, 2 * sizes.inner, columns, dtype=dtype),
        "down": torch.empty(num_experts, columns, sizes.inner, dtype=dtype),
        "num_picked": sizes.num_picked,
    }


def launch_of(sizes: Sizes, dtype: torch.dtype, capability: int) -> CudaLaunch:
    """What a mixture launches on such a GPU."""
    with named_gpu(capability), cuda_launches(capability) as launches:
        moe.norm_moe(**shaped(sizes, dtype), eps=EPS, is_normalized=True)
    (launch,) = launches
    return launch


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_compiles(sizes: Sizes, dtype: torch.dtype, capability: int):
    launch = launch_of(sizes, dtype, capability)
    resources = resources_of(launch.kernel, f"sm_{capability}a")
    assert resources.stack_bytes == 0
    # Programs wait for each other: there is one for each processor, and no two share one.
    assert launch.num_programs == NUM_PROCESSORS[capability]
    left = SHARED_MEMORY_BYTES[capability] + 1024 - launch.shared_bytes - resources.shared_bytes
    assert 0 <= left < launch.shared_bytes


@pytest.mark.parametrize("capability", [90, 100])
def test_the_next_kernel_begins_after_this_one_has_waited(capability: int):
    """As `token_attention` needs it; one of the two waits is that of the warp that picks."""
    code = machine_code_of(launch_of(QWEN, BF16, capability).kernel, f"sm_{capability}a")
    found = [name for name in code if name in ("ACQBULK", "PREEXIT")]
    assert sorted(found) == ["ACQBULK", "ACQBULK", "PREEXIT"]
    assert found[0] == "ACQBULK"
    assert any(name.startswith("UBLKCP") for name in code)  # a bulk copy


@pytest.mark.parametrize(
    ("change", "other"),
    [
        ("x", torch.empty(2, 2048, dtype=BF16)),
        ("norm_weight", torch.empty(2048, dtype=BF16)),
        ("router", torch.empty(128, 2048)),
        ("router_bias", torch.empty(128)),
        ("num_picked", 33),
    ],
)
def test_others_are_mixed_otherwise(change: str, other: Any):
    made = shaped(QWEN, BF16)
    with named_gpu(90):
        assert one_token_experts.can_mix(**made)
        assert not one_token_experts.can_mix(**{**made, change: other})
    with named_gpu(89):
        assert not one_token_experts.can_mix(**made)


def test_where_processes_share_processors_launches_do_not_wait_for_their_own_programs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Those of two processes would each hold what the other waits for."""
    made = shaped(QWEN, BF16)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    for has_service in (False, True):
        if has_service:
            (tmp_path / "control").touch()
        launch.may_share_processors.cache_clear()
        with named_gpu(90):
            assert one_token_experts.can_mix(**made) == (not has_service)
    launch.may_share_processors.cache_clear()


@given(
    sizes=st.builds(
        Sizes,
        columns=st.integers(1, 40).map(lambda chunks: chunks * 128),
        inner=st.integers(1, 20).map(lambda chunks: chunks * 128),
        num_experts=st.integers(1, 10).map(lambda warps: warps * 16),
        num_picked=st.integers(1, 40),
    ),
    processors=st.integers(1, 200),
    shared_bytes=st.integers(50_000, 232_448),
)
def test_rings_fit(sizes: Sizes, processors: int, shared_bytes: int):
    ring = ring_for(sizes, processors, shared_bytes)
    if ring is None:
        return
    assert sizes.num_picked <= sizes.num_experts <= processors
    assert 0 < ring.flight < ring.slots
    stage_bytes = ring.pairs * 4 * sizes.columns
    assert 0 < ring.rows * 2 * sizes.inner <= stage_bytes
    assert ring.most_pairs * processors >= sizes.num_picked * sizes.inner
    assert ring.most_rows * processors >= sizes.columns
    assert ring.slots * stage_bytes < ring.shared_bytes <= shared_bytes
