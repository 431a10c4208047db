"""Conversions there and back, and against a GGUF file written by other code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType

from dayshift.engine.api import Message
from dayshift.engine.models.convert import convert_model
from dayshift.engine.models.formats import load_model_config
from dayshift.engine.tokenizer import Tokenizer
from dayshift.experiments.planners import default_model_folder
from dayshift.types import DayshiftError
from tests.engine.gguf.conftest import write_gguf as write_gguf
from tests.engine.gguf.test_gguf import weights_of

GEMMA3 = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 16,
    "rope_local_base_freq": 10_000.0,
}
FIELDS: list[dict[str, Any]] = [
    {"model_type": "llama", "tie_word_embeddings": False},
    {"model_type": "qwen2"},
    {"model_type": "qwen3"},
    {"model_type": "qwen3_moe"},
    GEMMA3,
]


def assert_same_weights(got: Path, expected: Path) -> None:
    theirs = weights_of(expected)
    for name, weight in weights_of(got).items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=2e-7)  # Gemma's norms: 1 + w - 1


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: fields["model_type"])
def test_there_and_back(fields: dict[str, Any], make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_tiny_model(seed=1, rms_norm_eps=2.0**-20, **fields)
    convert_model(folder, tmp_path / "there.gguf", "F32")
    convert_model(tmp_path / "there.gguf", tmp_path / "back", "F32")
    assert load_model_config(tmp_path / "back") == load_model_config(folder)
    assert_same_weights(tmp_path / "there.gguf", folder)
    assert_same_weights(tmp_path / "back", folder)
    for tokenizer in (Tokenizer(tmp_path / "there.gguf"), Tokenizer(tmp_path / "back")):
        chat = tokenizer.render_chat((Message("user", "Greif zu: 把碗放在盘子上 🤖\n\tdone 1234"),))
        assert tokenizer.encode(chat) == Tokenizer(folder).encode(chat)
        assert tokenizer.eos_token_ids == Tokenizer(folder).eos_token_ids
        assert tokenizer.session_refusal is None


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "MXFP4"])
def test_quantised_files_are_those_of_other_code(
    name: str, make_tiny_model: Callable[..., Path], write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_tiny_model(seed=1, model_type="gpt_oss")
    convert_model(folder, tmp_path / "ours.gguf", name)
    theirs = write_gguf(
        folder, GGMLQuantizationType[name], others={"ffn_gate_inp.weight": GGMLQuantizationType.F32}
    )
    ours, expected = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        for path in (tmp_path / "ours.gguf", theirs)
    )
    assert ours.keys() == expected.keys()
    for tensor_name, tensor in ours.items():
        assert tensor.tensor_type == expected[tensor_name].tensor_type, tensor_name
        assert (tensor.data == expected[tensor_name].data).all(), tensor_name
    assert load_model_config(tmp_path / "ours.gguf") == load_model_config(theirs)


def test_a_folder_in_another_dtype(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_tiny_model(seed=1, rope_scaling={"rope_type": "linear", "factor": 2.0})
    convert_model(folder, tmp_path / "half", "BF16")
    assert load_model_config(tmp_path / "half") == load_model_config(folder)
    theirs = weights_of(folder)
    for name, weight in weights_of(tmp_path / "half").items():
        if name != "cos_sin":
            assert torch.equal(weight, theirs[name].bfloat16().float()), name


@pytest.mark.parametrize(
    ("out", "weight_type", "message"),
    [
        ("folder", "Q8_0", "type Q8_0 cannot be written to folders; allowed: F32, F16, BF16"),
        ("file.gguf", "Q4_K", "type Q4_K cannot be written to GGUF files; allowed: F32, F16, BF16, Q8_0"),
        (".", "F32", "exists already"),
    ],
)
def test_mistakes_are_one_line(
    out: str, weight_type: str, message: str, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(DayshiftError, match=message):
        convert_model(make_tiny_model(), tmp_path / out, weight_type)


def test_a_tokenizer_that_a_gguf_file_cannot_name_is_refused_with_what_can_be_done(tmp_path: Path) -> None:
    """The default planner's, which takes its protocol's phrases as tokens."""
    planner = default_model_folder()
    with pytest.raises(
        DayshiftError, match=r"cuts texts by a rule of its own.*be written to a folder"
    ) as caught:
        convert_model(planner, tmp_path / "planner.gguf", "Q8_0")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "planner.gguf").exists()
    convert_model(planner, tmp_path / "planner", "BF16")
    assert load_model_config(tmp_path / "planner") == load_model_config(planner)
