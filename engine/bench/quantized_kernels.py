"""Products with quantised matrices, at the sizes of well-known GGUF files, for `bench kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from dayshift.engine import kernels
from dayshift.engine.bench.kernels import Case
from dayshift.engine.quant.packed import PackedMatrix, pack

Q = GGMLQuantizationType
_CACHE_BYTES = 256 << 20  # more than any GPU's last cache


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedShape:
    """A matrix of a model, or those of all experts."""

    name: str
    quant_type: GGMLQuantizationType
    num_rows: int
    num_columns: int
    num_experts: int | None = None
    num_picked: int = 1


SHAPES = (
    QuantizedShape(name="qwen3-32b qkv", quant_type=Q.Q4_K, num_rows=10240, num_columns=5120),
    QuantizedShape(name="qwen3-32b gate/up", quant_type=Q.Q4_K, num_rows=51200, num_columns=5120),
    QuantizedShape(name="qwen3-32b down", quant_type=Q.Q6_K, num_rows=5120, num_columns=25600),
    QuantizedShape(name="llama-3.2-3b gate/up", quant_type=Q.Q4_K, num_rows=16384, num_columns=3072),
    QuantizedShape(name="llama-3.2-3b head", quant_type=Q.Q6_K, num_rows=128256, num_columns=3072),
    QuantizedShape(
        name="qwen3-30b-a3b gate/up",
        quant_type=Q.Q3_K,
        num_rows=768,
        num_columns=2048,
        num_experts=128,
        num_picked=8,
    ),
    QuantizedShape(
        name="qwen3-30b-a3b down",
        quant_type=Q.Q4_K,
        num_rows=2048,
        num_columns=768,
        num_experts=128,
        num_picked=8,
    ),
    QuantizedShape(
        name="gpt-oss-20b gate/up",
        quant_type=Q.MXFP4,
        num_rows=5760,
        num_columns=2880,
        num_experts=32,
        num_picked=4,
    ),
    *(
        QuantizedShape(name="4096 x 4096", quant_type=quant_type, num_rows=4096, num_columns=4096)
        for quant_type in (Q.Q8_0, Q.Q5_0, Q.Q5_1, Q.Q4_0, Q.Q4_1, Q.Q6_K, Q.Q5_K, Q.Q4_K, Q.Q3_K, Q.Q2_K)
    ),
)


def quantized_cases(num_tokens: tuple[int, ...] = (1, 4, 16)) -> Iterator[Case]:
    """Decode steps of every shape. Bytes are those of the packed planes that are read once."""
    for shape in SHAPES:
        for count in num_tokens:
            yield _case(shape, count)


def _case(shape: QuantizedShape, num_tokens: int) -> Case:
    generator = torch.Generator().manual_seed(num_tokens)
    picked = torch.stack(
        [
            torch.randperm(shape.num_experts or 1, generator=generator)[: shape.num_picked]
            for _ in range(num_tokens)
        ]
    )
    sample = pack(_random_raw(shape, num_rows=16, device="cpu"), shape.quant_type)
    row_bytes = sample.num_bytes / 16
    num_read = 1 if shape.num_experts is None else len(picked.unique())

    def make() -> list[Callable[[], object]]:
        x = torch.randn(num_tokens, shape.num_columns, dtype=torch.bfloat16, device="cuda")
        num_copies = max(2, min(32, int(_CACHE_BYTES / (num_read * row_bytes * shape.num_rows)) + 1))
        matrices = [_random_matrix(shape) for _ in range(min(num_copies, 8 if shape.num_experts else 32))]
        if shape.num_experts is None:
            return [partial(kernels.quantized_linear, x, matrix) for matrix in matrices]
        expert_ids = picked.cuda()
        return [partial(kernels.quantized_experts, x, expert_ids, matrix) for matrix in matrices]

    return Case(
        name=f"gguf {shape.quant_type.name}, {shape.name}, {num_tokens} tokens",
        work=num_read * row_bytes * shape.num_rows,
        is_bound_by_memory=True,
        make=make,
    )


def _random_matrix(shape: QuantizedShape) -> PackedMatrix:
    rows = shape.num_rows * (shape.num_experts or 1)
    raw = _random_raw(shape, num_rows=rows, device="cuda")
    if shape.num_experts is not None:
        raw = raw.view(shape.num_experts, shape.num_rows, -1)
    return pack(raw, shape.quant_type)


def _random_raw(shape: QuantizedShape, *, num_rows: int, device: str) -> torch.Tensor:
    """Random bytes: the time of a product does not depend on its values."""
    block_size, block_bytes = GGML_QUANT_SIZES[shape.quant_type]
    row_bytes = shape.num_columns // block_size * block_bytes
    return torch.randint(0, 256, (num_rows, row_bytes), dtype=torch.uint8, device=device)
