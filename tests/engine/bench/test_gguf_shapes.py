"""Quantised models of random weights for benchmarks: files without weights, and what is loaded for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q
from torch import Tensor

from dayshift.engine.bench.dummy_gguf import SHAPES, GgufShape, shape_named, write_gguf_shape
from dayshift.engine.bench.quantized_decode import (
    bytes_of_token,
    measure_quantized_decode,
    quantized_products,
)
from dayshift.engine.models.decoder import Decoder
from dayshift.engine.models.gguf_file import open_gguf
from dayshift.engine.models.inspect import inspect_model
from dayshift.engine.models.loader import load_decoder
from dayshift.engine.quant.packed import FORMATS, pack, unpack
from dayshift.engine.quant.random_packed import random_packed
from dayshift.types import DayshiftError

GB = 1e9
PUBLISHED_GB = {  # sizes of the files that llama.cpp's tools made of the published weights
    "qwen3-30b-a3b-q3_k_m": 14.7,
    "qwen3-32b-q4_k_m": 19.8,
    "llama-3.2-3b-q4_k_m": 2.0,
    "gpt-oss-20b-mxfp4": 12.1,
}


def small(shape: GgufShape) -> GgufShape:
    """The same kind of model, with two layers of each sort."""
    config, moe, window = shape.config, shape.config.moe, shape.config.sliding_window
    config = replace(
        config,
        hidden_size=256,
        intermediate_size=512,
        num_layers=4,
        vocab_size=300,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        moe=moe and replace(moe, num_experts=8, num_experts_per_token=2, intermediate_size=256),
        sliding_window=window and replace(window, is_sliding=(True, False) * 2),
    )
    return replace(shape, config=config)


def loaded(shape: GgufShape, path: Path, *, keep_quantized: bool) -> Decoder:
    return load_decoder(
        write_gguf_shape(shape, path),
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_positions=64,
        load_format="dummy",
        seed=0,
        keep_quantized=keep_quantized,
    )


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_is_as_large_as_the_published_one_and_takes_no_space(name: str, tmp_path: Path) -> None:
    path = write_gguf_shape(SHAPES[name], tmp_path / "m.gguf")
    assert path.stat().st_size / GB == pytest.approx(PUBLISHED_GB[name], abs=0.05)
    assert path.stat().st_blocks * 512 < 1 << 20


def test_types_are_those_of_llama_cpps_mixes(tmp_path: Path) -> None:
    def types(name: str, matrix: str) -> Counter[str]:
        file = open_gguf(write_gguf_shape(SHAPES[name], tmp_path / f"{name}.gguf"))
        found = (t.quant_type.name for key, t in file.tensors.items() if key.split(".")[-2] == matrix)
        return Counter(found)

    assert types("qwen3-32b-q4_k_m", "ffn_down") == {"Q6_K": 32, "Q4_K": 32}
    assert types("qwen3-32b-q4_k_m", "attn_v") == {"Q6_K": 32, "Q4_K": 32}
    assert types("qwen3-32b-q4_k_m", "token_embd") == {"Q4_K": 1}
    assert types("qwen3-32b-q4_k_m", "output") == {"Q6_K": 1}
    assert types("llama-3.2-3b-q4_k_m", "token_embd") == {"Q6_K": 1}
    assert types("qwen3-30b-a3b-q3_k_m", "attn_v") == {"Q5_K": 2, "Q4_K": 46}
    assert types("qwen3-30b-a3b-q3_k_m", "ffn_down_exps") == {"Q5_K": 3, "Q4_K": 45}
    assert types("qwen3-30b-a3b-q3_k_m", "attn_output") == {"Q4_K": 48}
    assert types("qwen3-30b-a3b-q3_k_m", "ffn_gate_exps") == {"Q3_K": 48}
    assert types("qwen3-30b-a3b-q3_k_m", "ffn_gate_inp") == {"F32": 48}
    assert types("gpt-oss-20b-mxfp4", "ffn_up_exps") == {"MXFP4": 24, "F32": 24}  # biases
    assert types("gpt-oss-20b-mxfp4", "attn_q") == {"Q8_0": 24, "F32": 24}


@pytest.mark.parametrize("name", SHAPES)
def test_random_weights_are_quantised_as_the_file_says(name: str, tmp_path: Path) -> None:
    shape = small(SHAPES[name])
    path = tmp_path / "m.gguf"
    model = loaded(shape, path, keep_quantized=True)
    products = quantized_products(model)
    # Of each layer qkv, o, and gate and up and down or the experts; and the head.
    assert len(products) == len(model.layers) * (4 if shape.config.moe is None else 3) + 1
    for product in products:
        y = product()
        assert y.isfinite().all()
        assert y.std() > 0.005
    unpacked = loaded(shape, path, keep_quantized=False)
    assert not quantized_products(unpacked)
    report = inspect_model(path)
    assert sum(parameter.numel() for parameter in unpacked.parameters()) == report.num_parameters


def test_a_token_reads_its_experts_and_no_embedding(tmp_path: Path) -> None:
    shape = small(SHAPES["gpt-oss-20b-mxfp4"])
    path = write_gguf_shape(shape, tmp_path / "m.gguf")
    tensors = open_gguf(path).tensors
    experts = sum(tensor.raw.nbytes for key, tensor in tensors.items() if "_exps." in key)
    others = sum(tensor.raw.nbytes for key, tensor in tensors.items() if "_exps." not in key)
    assert bytes_of_token(path) == others - tensors["token_embd.weight"].raw.nbytes + experts * 2 // 8
    tied = write_gguf_shape(small(SHAPES["llama-3.2-3b-q4_k_m"]), tmp_path / "tied.gguf")
    assert bytes_of_token(tied) == sum(tensor.raw.nbytes for tensor in open_gguf(tied).tensors.values())


@pytest.mark.parametrize("quant_type", FORMATS)
@pytest.mark.parametrize("shape", [(96, 512), (3, 32, 512)])
def test_random_matrices_lie_as_packed_ones_do(quant_type: Q, shape: tuple[int, ...]) -> None:
    matrix = random_packed(quant_type, shape, torch.Generator().manual_seed(0))
    weights = unpack(matrix)
    assert weights.shape == shape
    assert weights.std().item() == pytest.approx(0.023 if quant_type == Q.MXFP4 else 0.02, rel=0.05)
    assert abs(weights.mean().item()) < 0.005
    packed = pack(_file_rows(quant_type, shape), quant_type)

    def forms(planes: tuple[Tensor | None, ...]) -> list[object]:
        return [None if plane is None else (plane.dtype, plane.shape) for plane in planes]

    assert forms(matrix.planes) == forms(packed.planes)
    assert (matrix.num_experts, matrix.num_rows, matrix.num_columns) == (
        packed.num_experts,
        packed.num_rows,
        packed.num_columns,
    )


def _file_rows(quant_type: Q, shape: tuple[int, ...]) -> Tensor:
    block_size, block_bytes = GGML_QUANT_SIZES[quant_type]
    return torch.zeros(*shape[:-1], shape[-1] // block_size * block_bytes, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shape_named("qwen3-32b"), "shape qwen3-32b is unknown; allowed: qwen3-30b-a3b-q3_k_m, "),
        (lambda: list(measure_quantized_decode(["no"], 133, 1)), "shape no is unknown"),
    ],
)
def test_a_wrong_name_is_one_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(DayshiftError, match=message):
        call()
