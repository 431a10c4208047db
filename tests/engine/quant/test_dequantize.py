"""Every quantised format against the `gguf` package, bit for bit, on random bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine.quant import dequantize as dequantize_module
from dayshift.engine.quant.dequantize import SUPPORTED_TYPES, dequantize

# Where the float16 scales of a block lie; all other bytes may have any value.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
    "F32": (),
    "F16": (),
    "BF16": (),
}


def random_rows(quant_type: GGMLQuantizationType, num_rows: int, num_blocks: int, seed: int) -> np.ndarray:
    """uint8 (num_rows, bytes of a row); every scale is finite."""
    generator = np.random.default_rng(seed)
    size, block_bytes = GGML_QUANT_SIZES[quant_type]
    if quant_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16):
        floats = torch.from_numpy(generator.standard_normal((num_rows, num_blocks * size), np.float32))
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[quant_type.name]
        return floats.to(dtype).view(torch.uint8).numpy()
    blocks = generator.integers(0, 256, (num_rows * num_blocks, block_bytes), np.uint8)
    for offset in SCALES[quant_type.name]:
        scales = generator.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("quant_type", SUPPORTED_TYPES, ids=lambda quant_type: quant_type.name)
@given(num_rows=st.integers(1, 4), num_blocks=st.integers(1, 5), seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_weights_equal_the_gguf_packages(
    quant_type: GGMLQuantizationType, num_rows: int, num_blocks: int, seed: int
) -> None:
    raw = random_rows(quant_type, num_rows, num_blocks, seed)
    with np.errstate(over="ignore"):  # MXFP4's largest exponents
        expected = gguf.dequantize(raw, quant_type)
    weights = dequantize(torch.from_numpy(raw), quant_type)
    assert weights.dtype == torch.float32
    np.testing.assert_array_equal(weights.numpy().view(np.int32), expected.view(np.int32))


def test_the_types_of_the_fields_files_are_there() -> None:
    wanted = {"F32", "F16", "BF16", "MXFP4", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"}
    wanted |= {"Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K"}
    assert {quant_type.name for quant_type in SUPPORTED_TYPES} == wanted


def test_long_tensors_are_unpacked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.from_numpy(random_rows(GGMLQuantizationType.Q4_K, 6, 3, seed=1))
    whole = dequantize(raw, GGMLQuantizationType.Q4_K)
    monkeypatch.setattr(dequantize_module, "_CHUNK_BLOCKS", 4)
    assert torch.equal(dequantize(raw, GGMLQuantizationType.Q4_K), whole)


def test_stacked_matrices_keep_their_shape() -> None:
    raw = torch.from_numpy(random_rows(GGMLQuantizationType.Q8_0, 6, 2, seed=2))
    stacked = dequantize(raw.view(2, 3, -1), GGMLQuantizationType.Q8_0)
    assert torch.equal(stacked, dequantize(raw, GGMLQuantizationType.Q8_0).view(2, 3, 64))
