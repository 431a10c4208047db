"""What `inspect_model` says against the loaded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from dayshift.engine.models.inspect import inspect_model
from dayshift.engine.models.loader import gpu_weight_bytes, load_decoder
from dayshift.engine.models.quantized import QuantizedLinear, QuantizedMoe
from dayshift.types import DayshiftError
from tests.engine.gguf.conftest import write_gguf as write_gguf


@pytest.mark.parametrize(
    "fields",
    [{}, {"model_type": "qwen2", "tie_word_embeddings": False}, {"model_type": "qwen3_moe"}],
    ids=["tied", "biased", "experts"],
)
def test_parameters_are_those_that_the_engine_loads(
    fields: dict[str, Any], make_tiny_model: Callable[..., Path]
) -> None:
    folder = make_tiny_model(**fields)
    model = load_decoder(
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_positions=16,
        load_format="dummy",
        seed=0,
    )
    report = inspect_model(folder)
    assert report.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert report.weight_types == {"F32": report.num_parameters}
    assert report.loaded_bytes(4) < report.file_bytes < report.loaded_bytes(4) + 50_000  # the header
    assert report.session_refusal is None


@pytest.mark.parametrize("quant_type", ["Q4_0", "Q8_0"])
def test_gpu_memory_is_that_of_the_packed_model(
    quant_type: str, make_tiny_model: Callable[..., Path], write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(
        make_tiny_model(seed=1, model_type="qwen3_moe", moe_intermediate_size=64),
        GGMLQuantizationType[quant_type],
    )
    model = load_decoder(
        path,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        num_positions=16,
        load_format="auto",
        seed=0,
        keep_quantized=True,
    )
    num_bytes = sum(parameter.numel() * 2 for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            num_bytes += sum(matrix.num_bytes for matrix in module.parts.matrices)
        if isinstance(module, QuantizedMoe):
            num_bytes += sum(
                matrix.num_bytes for part in (module.gate_up, module.down) for matrix in part.matrices
            )
    assert gpu_weight_bytes(path, 2) == num_bytes < 2 * inspect_model(path).num_parameters


def test_a_model_of_the_fallback_says_so(make_tiny_model: Callable[..., Path]) -> None:
    report = inspect_model(make_tiny_model(rope_scaling={"rope_type": "dynamic", "factor": 2.0}))
    assert report.fallback_reason is not None
    assert "rope_type 'dynamic' is not supported" in report.fallback_reason
    assert report.session_refusal is not None
    assert report.config.num_layers == 4


def test_active_parameters_leave_out_the_other_experts(make_tiny_model: Callable[..., Path]) -> None:
    few, many = (
        inspect_model(make_tiny_model(model_type="qwen3_moe", num_experts=num_experts, num_experts_per_tok=2))
        for num_experts in (2, 6)
    )
    assert few.num_active_parameters == few.num_parameters
    # What is left of the larger model's four other experts is their rows of the four layers' routers.
    assert many.num_active_parameters - few.num_active_parameters == 4 * 4 * 64


def test_a_folder_without_weights_is_refused(make_tiny_model: Callable[..., Path]) -> None:
    folder = make_tiny_model()
    (folder / "model.safetensors").unlink()
    with pytest.raises(DayshiftError, match=r"has no \.safetensors file"):
        inspect_model(folder)
