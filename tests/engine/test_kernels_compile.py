"""What a GPU would refuse is found without one: all kernels compile for every generation of GPUs that is
supported, fit its shared memory, and overlap with each other without touching what is not there yet."""

import re
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from gguf import GGMLQuantizationType

from dayshift.engine.quant.dequantize import BLOCK_TYPES
from tests.engine.compiled_kernels import SHARED_MEMORY_BYTES, Compiled, answers_of, compiled, launched
from tests.engine.kernel_launches import (
    SHAPES,
    Launches,
    asking_for_a_gpu,
    launched_in_source,
    launches,
    packed_launches,
)

CAPABILITIES = list(SHARED_MEMORY_BYTES)
MODEL = "qwen3-30b-a3b"
NAMES = list(launches(SHAPES[MODEL]))
every_generation = pytest.mark.parametrize("capability", CAPABILITIES)

# What no launch writes: weights, and tables that are filled when a model is loaded. And picks of experts,
# written before the kernel in front of the one that reads them: see `test_picks_are_there`.
MAY_READ_BEFORE_WAIT = {
    "engine.kernels.norm._rms_norm": {"weight_ptr"},
    "engine.kernels.decode_attention._attend_share": {"cos_sin_ptr"},
    "engine.kernels.routing._norm_router": {"router_ptr", "norm_ptr"},
    "engine.kernels.quantized_inputs._norm_points": {"weight_ptr"},
    "engine.kernels.quantized_products._multiply_rows": {
        *("low_ptr", "high_ptr", "scales_ptr", "minimums_ptr", "group_scales_ptr", "group_minimums_ptr"),
        "expert_ids_ptr",
    },
    "engine.kernels.few_token_experts._picks_down": {"expert_ids_ptr", "weights_ptr", "down_ptr"},
    "engine.kernels.one_token_linear._multiply_token": {"weight_ptr"},
    "engine.kernels.one_token_stream._stream_token": {"weight_ptr", "norm_ptr"},
    # The pool of earlier steps, and where the step's tokens stand: see `test_a_step_is_placed`.
    "engine.kernels.token_attention._attend_token": {
        *("pools[0]", "pools[1]", *(f"place[{i}]" for i in range(4))),
        *("norms[0]", "norms[1]", "sinks_ptr"),
    },
    "policy.smolvla.layer_norm._offset_layer_norm": {"weight_ptr", "bias_ptr"},
}

# Programs without a share of the keys end at once, and have written nothing. One always has a share.
MAY_END_BEFORE_WAIT = {"engine.kernels.token_attention._attend_token"}


@pytest.fixture(scope="module", autouse=True)
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@cache
def launches_of(shape: str) -> Launches:
    return launches(SHAPES[shape])


def assert_fits(kernel: Compiled, capability: int) -> None:
    """A GPU of this capability loads it, and it is safe beside the kernel in front of it."""
    assert kernel.made.asm["cubin"], kernel.name
    assert kernel.shared_bytes <= SHARED_MEMORY_BYTES[capability], kernel.name
    # A kernel that let the next one begin, and did not wait itself, would end before the one in front.
    assert ("griddepcontrol" in kernel.ptx) == ("griddepcontrol.wait" in kernel.ptx), kernel.name
    assert ("griddepcontrol.wait" in kernel.ptx) == kernel.overlaps, kernel.name
    if kernel.overlaps:
        # Every thread comes to the wait, and has written nothing before.
        never = r"st\.global|cp|atom|red"
        if kernel.name not in MAY_END_BEFORE_WAIT:
            never += "|bra|ret|exit"
        assert not re.search(rf"\b({never})\b", kernel.before_wait), kernel.name
        assert kernel.read_before_wait() <= MAY_READ_BEFORE_WAIT.get(kernel.name, set()), kernel.name


def test_every_kernel_that_is_launched_is_compiled_here():
    assert set().union(*map(launched, launches_of(MODEL).values())) == launched_in_source()


def test_kernels_are_compiled_as_for_the_gpu_that_is_named():
    """Whatever a launch asks the device, it is not answered for the CPU, where the tensors are."""
    assert asking_for_a_gpu() <= set(answers_of(90))


@every_generation
@pytest.mark.parametrize("name", NAMES)
def test_compiles(name: str, capability: int):
    for kernel in compiled(launches_of(MODEL)[name], capability):
        assert_fits(kernel, capability)
        assert kernel.overlaps <= (capability >= 90)


@pytest.mark.parametrize("quant_type", BLOCK_TYPES, ids=lambda quant_type: quant_type.name)
def test_packed_products_compile(quant_type: GGMLQuantizationType):
    for call in packed_launches(quant_type, torch.bfloat16).values():
        for kernel in compiled(call, 90):
            assert_fits(kernel, 90)


@pytest.mark.slow  # seven models for three generations
@every_generation
@pytest.mark.parametrize("shape", SHAPES)
def test_every_kernel_of_a_model_compiles(shape: str, capability: int):
    for call in launches_of(shape).values():
        for kernel in compiled(call, capability):
            assert_fits(kernel, capability)


@pytest.mark.parametrize(
    ("shape", "name", "capability"),
    [
        ("gpt-oss-20b", "attention, 8 decodes, window of 128", 90),
        ("gpt-oss-20b", "attention, a chunk, window of 128", 90),
        ("gpt-oss-20b", "experts, 40 tokens", 90),  # with biases
        ("gemma-3-4b", "attention, 8 decodes", 89),  # heads of 256, and the least shared memory
        ("gemma-3-4b", "attention, a chunk", 89),
        ("gemma-3-4b", "attention, batch-invariant", 89),
        ("small, float32", "attention, a chunk", 90),
        ("small, float32", "experts, 40 tokens", 90),
    ],
)
def test_what_other_models_need_compiles(shape: str, name: str, capability: int):
    """Of the slow test above, what shared memory and registers are shortest for."""
    for kernel in compiled(launches_of(shape)[name], capability):
        assert_fits(kernel, capability)


@pytest.mark.parametrize("name", ["experts, 1 token", "packed experts"])
def test_picks_are_there(name: str):
    """A kernel that reads picks without a wait of its own comes behind one that has waited for them before it
    lets the next one begin."""
    kernels = compiled(launches_of(MODEL)[name], 90)
    reading = [k.overlaps and "expert_ids_ptr" in k.read_before_wait() for k in kernels]
    assert not reading[0]
    for front, reads in zip(kernels, reading[1:], strict=False):
        assert not reads or "griddepcontrol.launch_dependents" not in front.before_wait


@pytest.mark.parametrize(
    ("name", "kernel", "instructions"),
    [
        ("linear, 16 tokens", "tiled_linear._multiply_rows", "wgmma cp.async"),
        ("linear, batch-invariant", "invariant_linear._multiply_tile", "mma cp.async"),
        ("attention, 8 decodes", "decode_attention._attend_share", "mma cp.async"),
        ("attention, 8 decodes, int8", "decode_attention._attend_share", "mma cp.async f16x2"),
        ("attention, 8 decodes, fp8", "decode_attention._attend_share", "mma cp.async cvt.rn.f16x2.e4m3x2"),
        ("attention, a chunk, int8", "chunk_attention._attend_tile", "wgmma cp.async atom"),
        ("attention, a chunk", "chunk_attention._attend_tile", "wgmma cp.async atom"),
        ("attention, 4,096 tokens", "chunk_attention._attend_tile", "wgmma cp.async"),
        ("experts, 1 token", "few_token_experts._pick_gate_up", "ld.global.v4.b32"),
        ("experts, 40 tokens", "tiled_experts._gate_up_tile", "wgmma cp.async.bulk.tensor"),
        ("experts, 4,096 tokens", "tiled_experts._gate_up_tile", "wgmma cp.async.bulk.tensor"),
        ("experts, 4,096 tokens", "tiled_experts._down_tile", "wgmma cp.async.bulk.tensor"),
    ],
)
def test_hopper_multiplies_on_tensor_cores_while_it_loads(name: str, kernel: str, instructions: str):
    """And nothing is spilled."""
    ptx = {made.name: made.ptx for made in compiled(launches_of(MODEL)[name], 90)}[f"engine.kernels.{kernel}"]
    assert [word for word in instructions.split() if word not in ptx] == []
    assert ".local" not in ptx


def test_long_steps_do_not_split_their_keys():
    (kernel,) = compiled(launches_of(MODEL)["attention, 4,096 tokens"], 90)
    assert not re.search(r"\batom\b", kernel.ptx)


def test_a_step_is_placed():
    """What reads the pool, and where tokens stand, without a wait of its own comes behind a kernel that has
    waited for them before it lets the next one begin."""
    *_, front, attend, _ = compiled(launches_of(MODEL)["packed qkv, attention, o, 1 token"], 90)
    assert attend.name == "engine.kernels.token_attention._attend_token"
    assert "griddepcontrol.launch_dependents" not in front.before_wait
