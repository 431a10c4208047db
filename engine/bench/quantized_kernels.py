"""Products with quantised matrices, at the sizes of well-known GGUF files, for `bench kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from gguf import GGMLQuantizationType

from dayshift.engine import kernels
from dayshift.engine.bench.kernels import Case
from dayshift.engine.quant.packed import packed_bytes
from dayshift.engine.quant.random_packed import random_packed

Q = GGMLQuantizationType
_CACHE_BYTES = 256 << 20  # more than any GPU's last cache


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedShape:
    """A matrix of a model."""

    name: str
    quant_type: GGMLQuantizationType
    num_rows: int
    num_columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedExperts:
    """The experts of a layer, without biases."""

    name: str
    gate_up: GGMLQuantizationType
    down: GGMLQuantizationType
    size: int
    inner_size: int
    num_experts: int
    num_picked: int


SHAPES = (
    QuantizedShape(name="qwen3-32b qkv", quant_type=Q.Q4_K, num_rows=10240, num_columns=5120),
    QuantizedShape(name="qwen3-32b gate/up", quant_type=Q.Q4_K, num_rows=51200, num_columns=5120),
    QuantizedShape(name="qwen3-32b down", quant_type=Q.Q6_K, num_rows=5120, num_columns=25600),
    QuantizedShape(name="llama-3.2-3b gate/up", quant_type=Q.Q4_K, num_rows=16384, num_columns=3072),
    QuantizedShape(name="llama-3.2-3b head", quant_type=Q.Q6_K, num_rows=128256, num_columns=3072),
    *(
        QuantizedShape(name="4096 x 4096", quant_type=quant_type, num_rows=4096, num_columns=4096)
        for quant_type in (Q.Q8_0, Q.Q5_0, Q.Q5_1, Q.Q4_0, Q.Q4_1, Q.Q6_K, Q.Q5_K, Q.Q4_K, Q.Q3_K, Q.Q2_K)
    ),
)
EXPERTS = (
    QuantizedExperts(
        name="qwen3-30b-a3b",
        gate_up=Q.Q3_K,
        down=Q.Q4_K,
        size=2048,
        inner_size=768,
        num_experts=128,
        num_picked=8,
    ),
    QuantizedExperts(
        name="gpt-oss-20b",
        gate_up=Q.MXFP4,
        down=Q.MXFP4,
        size=2880,
        inner_size=2880,
        num_experts=32,
        num_picked=4,
    ),
)


def quantized_cases(num_tokens: tuple[int, ...] = (1, 4, 16)) -> Iterator[Case]:
    """Decode steps of every shape. Bytes are those of the packed planes that are read once."""
    for count in num_tokens:
        for shape in SHAPES:
            yield _case(shape, count)
        for experts in EXPERTS:
            yield _experts_case(experts, count)


def _case(shape: QuantizedShape, num_tokens: int) -> Case:
    num_bytes = packed_bytes(shape.num_rows * shape.num_columns, shape.quant_type)

    def make() -> list[Callable[[], object]]:
        x = torch.randn(num_tokens, shape.num_columns, dtype=torch.bfloat16, device="cuda")
        size, generator = (shape.num_rows, shape.num_columns), torch.Generator("cuda").manual_seed(0)
        num_copies = max(2, min(32, _CACHE_BYTES // num_bytes + 1))
        matrices = [random_packed(shape.quant_type, size, generator) for _ in range(num_copies)]
        return [partial(kernels.quantized_linear, x, (matrix,)) for matrix in matrices]

    return Case(
        name=f"gguf {shape.quant_type.name}, {shape.name}, {num_tokens} tokens",
        work=num_bytes,
        is_bound_by_memory=True,
        make=make,
    )


def _experts_case(experts: QuantizedExperts, num_tokens: int) -> Case:
    num_experts, size, inner_size = experts.num_experts, experts.size, experts.inner_size
    generator = torch.Generator().manual_seed(num_tokens)
    picked = torch.stack(
        [torch.randperm(num_experts, generator=generator)[: experts.num_picked] for _ in range(num_tokens)]
    )
    of_expert = packed_bytes(2 * inner_size * size, experts.gate_up) + packed_bytes(
        size * inner_size, experts.down
    )

    def make() -> list[Callable[[], object]]:
        x = torch.randn(num_tokens, size, dtype=torch.bfloat16, device="cuda")
        weights, expert_ids = torch.rand(picked.shape, device="cuda"), picked.cuda()
        on_gpu = torch.Generator("cuda").manual_seed(0)

        def mixture() -> Callable[[], object]:
            gate_up = random_packed(experts.gate_up, (num_experts, 2 * inner_size, size), on_gpu)
            down = random_packed(experts.down, (num_experts, size, inner_size), on_gpu)
            mix = partial(kernels.quantized_moe, gate_up_bias=None, down_bias=None, activation="silu")
            return partial(mix, x, weights, expert_ids, (gate_up,), down)

        return [mixture() for _ in range(8)]

    return Case(
        name=f"gguf {experts.gate_up.name}, experts of {experts.name}, {num_tokens} tokens",
        work=len(picked.unique()) * of_expert,
        is_bound_by_memory=True,
        make=make,
    )
