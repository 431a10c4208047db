"""Picks and experts of some tokens by bulk copies: against their torch twin, and compiled without a GPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dayshift.engine.kernels import bulk_experts, reference
from dayshift.engine.kernels.bulk_experts import plan_for
from dayshift.engine.models.config import Activation
from tests.engine.compiled_kernels import NUM_PROCESSORS, SHARED_MEMORY_BYTES, named_gpu
from tests.engine.cuda_kernels import CudaLaunch, cuda_launches, machine_code_of, resources_of
from tests.engine.test_kernels_triton import assert_close, randn

BF16, FP16 = torch.bfloat16, torch.float16
PROCESSOR_REGISTERS = 65_536
EXPERTS, PICKED, HIDDEN, INNER = 128, 8, 2048, 768  # of Qwen3-30B-A3B


def operands(
    num_tokens: int, num_experts: int, hidden: int, inner: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, logits, gate_up, down, all on the GPU. A token's logits differ: of equal ones torch picks any."""
    x = randn(num_tokens, hidden, dtype=dtype)
    ranks = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(1)).argsort(1)
    logits = ((ranks - num_experts // 2) / 16).to(dtype)
    gate_up = randn(num_experts, 2 * inner, hidden, dtype=dtype, seed=2) / hidden**0.5
    down = randn(num_experts, hidden, inner, dtype=dtype, seed=3) / inner**0.5
    return x.cuda(), logits.cuda(), gate_up.cuda(), down.cuda()


def specified(
    x: torch.Tensor,
    logits: torch.Tensor,
    num_picked: int,
    is_normalized: bool,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    activation: Activation = "silu",
) -> torch.Tensor:
    weights, expert_ids = reference.route_top_k(logits, num_picked, is_normalized)
    return reference.moe_mlp(x, weights, expert_ids, gate_up, down, activation=activation)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_picked", "hidden", "inner", "activation", "is_normalized"),
    [
        (5, 32, 4, 2048, 768, "silu", True),
        (8, 128, 8, 2048, 768, "silu", True),
        (16, 128, 8, 2048, 768, "silu", True),
        (100, 128, 8, 2048, 768, "silu", True),
        (9, 64, 6, 512, 256, "gelu_tanh", False),
        (32, 32, 1, 1024, 1024, "clamped_swiglu", True),
        (33, 32, 8, 2048, 512, "silu", False),
        (100, 32, 8, 512, 256, "silu", True),  # 25 tokens of an expert
        (128, 256, 16, 512, 256, "silu", True),
    ],
)
def test_mixes(
    num_tokens: int,
    num_experts: int,
    num_picked: int,
    hidden: int,
    inner: int,
    activation: Activation,
    is_normalized: bool,
    dtype: torch.dtype,
):
    x, logits, *weights = operands(num_tokens, num_experts, hidden, inner, dtype)
    assert bulk_experts.can_mix(x, logits, num_picked, *weights)
    args = (x, logits, num_picked, is_normalized, *weights)
    bulk_experts.mix(*args, activation=activation)
    actual = bulk_experts.mix(*args, activation=activation)  # begins while the first ends
    assert_close(actual.cpu(), specified(*args, activation=activation).cpu())


@pytest.mark.gpu
def test_equal_logits_pick_the_first_expert():
    x, logits, *weights = operands(20, 32, 512, 256, BF16)
    logits = (logits * 2).round() / 2
    ranks = logits.float() - torch.arange(32, device="cuda") / 1000
    picked = ranks.topk(4, dim=-1).indices
    shares = logits.float().gather(1, picked).softmax(-1)
    actual = bulk_experts.mix(x, logits, 4, True, *weights)
    assert_close(actual.cpu(), reference.moe_mlp(x, shares, picked, *weights).cpu())


@pytest.mark.gpu
def test_every_token_picks_the_same_experts():
    """More tokens of an expert than a tile holds."""
    x, logits, *weights = operands(70, 32, 512, 256, BF16)
    args = (x, logits[:1].expand_as(logits).contiguous(), 2, True, *weights)
    assert_close(bulk_experts.mix(*args).cpu(), specified(*args).cpu())


@pytest.mark.gpu
def test_layers_in_a_row_wait_for_each_other():
    x, logits, *weights = operands(12, 32, 512, 256, BF16)

    def layers() -> torch.Tensor:
        out = x
        for layer in range(4):
            out = bulk_experts.mix(out, logits.roll(layer, 1), 4, True, *weights)
        return out

    expected = x
    for layer in range(4):
        expected = specified(expected, logits.roll(layer, 1), 4, True, *weights)
    assert_close(layers().cpu(), expected.cpu())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers()
    for _ in range(50):
        graph.replay()
    assert torch.equal(out, layers())


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("num_tokens", [5, 8, 9, 100])
def test_compiles(num_tokens: int, dtype: torch.dtype, capability: int):
    for launch in launches_of(num_tokens, dtype, capability):
        resources = resources_of(launch.kernel, f"sm_{capability}a")
        assert resources.stack_bytes == 0
        # One program on a processor.
        assert launch.num_programs == NUM_PROCESSORS[capability]
        left = SHARED_MEMORY_BYTES[capability] + 1024 - launch.shared_bytes - resources.shared_bytes
        assert 0 <= left < launch.shared_bytes
        assert launch.num_threads * resources.registers <= PROCESSOR_REGISTERS


@pytest.mark.parametrize("capability", [90, 100])
def test_the_next_kernel_begins_after_this_one_has_waited(capability: int):
    """Down reads the logits, without a wait of its own, that were written before gate and up began."""
    for launch in launches_of(8, BF16, capability):
        code = machine_code_of(launch.kernel, f"sm_{capability}a")
        assert [name for name in code if name in ("ACQBULK", "PREEXIT")] == ["ACQBULK", "PREEXIT"]
        assert any(name.startswith("UBLKCP") for name in code)  # a bulk copy


def launches_of(num_tokens: int, dtype: torch.dtype, capability: int) -> list[CudaLaunch]:
    """What Qwen3-30B-A3B launches on such a GPU before the sum."""
    x, logits, gate_up, down = unused(num_tokens, dtype)
    with named_gpu(capability), cuda_launches(capability) as launches, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk_experts, "sum_picks", lambda outs, weights: outs)
        patch.setattr(bulk_experts, "route_top_k", reference.route_top_k)
        assert bulk_experts.can_mix(x, logits, PICKED, gate_up, down)
        bulk_experts.mix(x, logits, PICKED, True, gate_up, down)
    assert [launch.kernel.name for launch in launches] == ["mix_gate_up", "mix_down"]
    return launches


def unused(
    num_tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, logits, gate_up, down of Qwen3-30B-A3B, in memory that nobody touches."""
    return (
        torch.empty(num_tokens, HIDDEN, dtype=dtype),
        torch.empty(num_tokens, EXPERTS, dtype=dtype),
        torch.empty(EXPERTS, 2 * INNER, HIDDEN, dtype=dtype),
        torch.empty(EXPERTS, HIDDEN, INNER, dtype=dtype),
    )


@pytest.mark.parametrize("num_tokens", [4, 129])
def test_other_numbers_of_tokens_are_for_others(num_tokens: int):
    x, logits, gate_up, down = unused(num_tokens, BF16)
    with named_gpu(90):
        assert not bulk_experts.can_mix(x, logits, PICKED, gate_up, down)


def test_other_gpus_dtypes_and_sizes_are_for_others():
    x, logits, gate_up, down = unused(8, BF16)
    wide = unused(8, torch.float32)
    with named_gpu(90):
        assert bulk_experts.can_mix(x, logits, 8, gate_up, down)
        assert not bulk_experts.can_mix(x, logits.float(), 8, gate_up, down)
        assert not bulk_experts.can_mix(wide[0], wide[1], 8, wide[2], wide[3])
        assert not bulk_experts.can_mix(x[:, :-64], logits, 8, gate_up, down[:, :-64])
        assert not bulk_experts.can_mix(torch.empty(8, 2049, dtype=BF16)[:, 1:], logits, 8, gate_up, down)
    with named_gpu(89):
        assert not bulk_experts.can_mix(x, logits, 8, gate_up, down)


@given(
    num_tokens=st.integers(5, 128),
    hidden=st.integers(1, 40).map(lambda chunks: chunks * 128),
    inner=st.integers(1, 20).map(lambda chunks: chunks * 64),
    num_experts=st.integers(1, 300),
    num_picked=st.integers(1, 20),
    shared_bytes=st.integers(100_000, 232_448),
)
def test_plans_fit(
    num_tokens: int, hidden: int, inner: int, num_experts: int, num_picked: int, shared_bytes: int
):
    plan = plan_for(num_tokens, hidden, inner, num_experts, num_picked, shared_bytes)
    if plan is None:
        return
    assert num_tokens <= plan.most_tokens
    for ring, columns in ((plan.gate_up, hidden), (plan.down, inner)):
        slot_bytes = 16 // ring.unit_slots * columns * 2
        assert columns % (64 * ring.parts) == 0
        assert 0 < ring.flight < ring.slots
        assert ring.slots % (ring.unit_slots * (8 // ring.parts)) == 0
        assert ring.slots * slot_bytes < ring.shared_bytes <= shared_bytes
