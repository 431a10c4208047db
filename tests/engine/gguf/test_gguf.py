"""GGUF files against the Hugging Face folders that they were written from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file, save_file

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import Message, SamplingParams
from dayshift.engine.models.folder import resolve_model
from dayshift.engine.models.formats import load_model_config
from dayshift.engine.models.gguf_file import gguf_parts, open_gguf
from dayshift.engine.models.gguf_tokenizer import read_gguf_tokenizer
from dayshift.engine.models.inspect import inspect_model
from dayshift.engine.models.loader import load_decoder, model_identity
from dayshift.engine.models.quantized import QuantizedLinear, QuantizedMoe
from dayshift.engine.models.rope import inverse_frequencies
from dayshift.engine.tokenizer import Tokenizer
from dayshift.types import DayshiftError
from tests.engine.driving import generate
from tests.engine.test_decoder import logits_of, make_runner

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
Q = GGMLQuantizationType

MakeModel = Callable[..., Path]
WriteGguf = Callable[..., Path]


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    decoder = load_decoder(
        model,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_positions=128,
        load_format="auto",
        seed=0,
    )
    return dict(decoder.named_parameters()) | {"cos_sin": decoder.cos_sin}


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "llama", "tie_word_embeddings": False},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "num_key_value_heads": 1},
        {"model_type": "qwen3_moe"},
        {"model_type": "gpt_oss"},
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
            "rope_local_base_freq": 10_000.0,
        },
    ],
    ids=lambda fields: fields["model_type"],
)
def test_float_weights_are_those_of_the_folder(
    fields: dict[str, Any], make_tiny_model: MakeModel, write_gguf: WriteGguf
) -> None:
    folder = make_tiny_model(seed=1, **fields)
    path = write_gguf(folder)
    ours, theirs = load_model_config(path), load_model_config(folder)
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    assert ours.attention_scale == theirs.attention_scale
    same = {"rms_norm_eps": 0.0, "query_pre_attn_scalar": None}  # the first is float32 in the file
    assert replace(ours, **same) == replace(theirs, **same)
    expected, got = weights_of(folder), weights_of(path)
    assert got.keys() == expected.keys()
    for name, weight in got.items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("quant_type", [Q.BF16, Q.Q8_0, Q.Q5_1, Q.Q4_0, Q.MXFP4], ids=lambda q: q.name)
def test_quantised_weights_compute_as_their_rounded_values(
    quant_type: Q, make_tiny_model: MakeModel, write_gguf: WriteGguf, tmp_path: Path
) -> None:
    """The GGUF file answers as a folder with weights that were quantised and unpacked again."""
    folder = make_tiny_model(seed=2, model_type="qwen3_moe", moe_intermediate_size=64)
    path = write_gguf(folder, quant_type)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 2:
            weights[name] = gguf.dequantize(gguf.quantize(weight, quant_type), quant_type)
    rounded = tmp_path / "rounded"
    rounded.mkdir()
    for file in folder.glob("*.json"):
        (rounded / file.name).write_bytes(file.read_bytes())
    save_file(weights, rounded / "model.safetensors", metadata={"format": "pt"})

    replies = []
    for model in (path, rounded):
        engine = Engine(EngineConfig(model=str(model), device="cpu", num_kv_blocks=16))
        sampling = SamplingParams(max_tokens=16, ignore_eos=True)
        replies.append(generate(engine, range(40), sampling).token_ids)
        engine.close()
    assert replies[0] == replies[1]


QUANTISED: dict[str, tuple[dict[str, Any], Q, dict[str, Q]]] = {
    # llama.cpp's mixtures give values, the second MLP matrix and the embedding more bits
    "llama": ({"model_type": "llama"}, Q.Q4_0, {"attn_v.weight": Q.Q8_0, "ffn_down.weight": Q.Q5_1}),
    "qwen2-untied": ({"model_type": "qwen2", "tie_word_embeddings": False}, Q.Q5_0, {"attn_k.weight": Q.F16}),
    "qwen3-moe": (
        {"model_type": "qwen3_moe", "moe_intermediate_size": 64},
        Q.Q4_1,
        {"ffn_gate_inp.weight": Q.F32, "ffn_down_exps.weight": Q.Q8_0},
    ),
    "gpt-oss": ({"model_type": "gpt_oss"}, Q.Q8_0, {"exps.weight": Q.MXFP4, "ffn_gate_inp.weight": Q.F32}),
}


@pytest.mark.parametrize("name", QUANTISED)
def test_packed_weights_compute_as_unpacked_ones(
    name: str, make_tiny_model: MakeModel, write_gguf: WriteGguf
) -> None:
    """What runs on a GPU, with the kernels' twins: weights stay quantised, decoding and prefill agree."""
    fields, quant_type, others = QUANTISED[name]
    path = write_gguf(make_tiny_model(seed=3, **fields), quant_type, others=others)
    unpacked, packed = (make_runner(path, keep_quantized=is_kept) for is_kept in (False, True))
    num_packed = sum(isinstance(m, QuantizedLinear | QuantizedMoe) for m in packed.model.modules())
    # four layers of qkv, o and the MLP's one or two, and the head; a layer of mixed kinds is unpacked
    assert num_packed == {"llama": 17, "qwen2-untied": 13, "qwen3-moe": 13, "gpt-oss": 13}[name]
    token_ids = torch.randint(0, 512, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = logits_of(unpacked, token_ids, [60])
    for chunk_sizes in ([60], [20, 3, *[1] * 37]):
        got = logits_of(packed, token_ids, chunk_sizes)[-1:]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_the_parts_of_a_split_file_are_one_model(make_tiny_model: MakeModel, write_gguf: WriteGguf) -> None:
    folder = make_tiny_model(seed=1)
    whole, first = write_gguf(folder), write_gguf(folder, num_parts=3)
    second = gguf_parts(first)[1]
    assert inspect_model(second).num_parameters == inspect_model(whole).num_parameters
    expected, got = weights_of(whole), weights_of(first)
    assert got.keys() == expected.keys()
    for name, weight in got.items():
        assert torch.equal(weight, expected[name]), name
    alone = first.parent / "alone"
    alone.mkdir()
    for part in gguf_parts(first):
        part.rename(alone / part.name)
    assert resolve_model(str(alone)) == alone / first.name
    before = model_identity(alone / first.name, dtype=torch.float32)
    last = gguf_parts(alone / first.name)[2]
    last.write_bytes(last.read_bytes()[:-1] + b"\1")
    assert model_identity(alone / first.name, dtype=torch.float32) != before
    last.unlink()
    with pytest.raises(DayshiftError, match=r"-00003-of-00003\.gguf cannot be read"):
        load_model_config(alone / first.name)


def test_llama3_frequencies_are_read_as_divisors(make_tiny_model: MakeModel, write_gguf: WriteGguf) -> None:
    folder = make_tiny_model(model_type="llama", rope_scaling=LLAMA3_ROPE, rope_theta=500.0)
    plain = make_tiny_model(model_type="llama", rope_theta=500.0)
    expected = inverse_frequencies(load_model_config(folder))
    divisors = inverse_frequencies(load_model_config(plain)) / expected
    assert divisors.max() == pytest.approx(8)
    path = write_gguf(folder, divisors=divisors.numpy())
    torch.testing.assert_close(inverse_frequencies(load_model_config(path)), expected, rtol=1e-6, atol=0)


def test_tokenizer_and_template_are_those_of_the_folder(
    make_tiny_model: MakeModel, write_gguf: WriteGguf
) -> None:
    folder = make_tiny_model()
    ours, theirs = Tokenizer(write_gguf(folder)), Tokenizer(folder)
    assert ours.eos_token_ids == theirs.eos_token_ids == {0, 2}
    assert ours.special_token_ids == theirs.special_token_ids
    assert ours.session_refusal is None
    chat = theirs.render_chat((Message("user", "Greif zu: 把碗放在盘子上 🤖\n\tdone 1234"),))
    assert ours.render_chat((Message("user", "Greif zu: 把碗放在盘子上 🤖\n\tdone 1234"),)) == chat
    assert ours.encode(chat) == theirs.encode(chat)
    assert ours.decode(ours.encode(chat)) == theirs.decode(theirs.encode(chat))


@pytest.mark.parametrize(
    ("pre", "text", "cut"),
    [
        ("qwen2", "it's 1234\n\n  x", ["it", "'s", " ", "1", "2", "3", "4", "\n\n", " ", " x"]),
        ("llama-bpe", "it's 1234\n\n  x", ["it", "'s", " ", "123", "4", "\n\n", " ", " x"]),
        ("gpt-4o", "It'sABc 1234/\n x", ["It's", "ABc", " ", "123", "4", "/\n", " x"]),
        ("smollm", "it's 12 x", ["it", "'s", " ", "1", "2", " x"]),
        ("gpt-2", "it's 12 x", ["it", "'s", " 12", " x"]),
    ],
)
def test_texts_are_cut_as_the_model_was_trained(
    pre: str, text: str, cut: list[str], make_tiny_model: MakeModel, write_gguf: WriteGguf
) -> None:
    folder = make_tiny_model()
    path = write_gguf(folder, metadata={"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False})
    parts = read_gguf_tokenizer(open_gguf(path))
    assert parts.tokenizer.pre_tokenizer is not None
    pieces = parts.tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == cut


def test_plain_texts_begin_with_bos_where_the_file_says_so(
    make_tiny_model: MakeModel, write_gguf: WriteGguf
) -> None:
    metadata = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 1}
    tokenizer = Tokenizer(write_gguf(make_tiny_model(), metadata=metadata))
    plain = tokenizer.encode("put the bowl")
    assert tokenizer.encode("put the bowl", add_special_tokens=True) == [1, *plain]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported; supported are llama"),
        ({"qwen3.rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope' is not supported"),
        ({"qwen3.rope.dimension_count": 8}, "rope.dimension_count is 8; only whole heads of 16"),
        ({"qwen3.attention.head_count_kv": [2, 1, 2, 1]}, "head_count_kv that differs between layers"),
        (
            {"split.count": 3},
            "is one of 3 parts of a split GGUF file; its name has to end in -00001-of-00003",
        ),
    ],
)
def test_what_is_not_supported_is_refused(
    metadata: dict[str, Any], message: str, make_tiny_model: MakeModel, write_gguf: WriteGguf
) -> None:
    path = write_gguf(make_tiny_model(), metadata=metadata)
    with pytest.raises(DayshiftError, match=message):
        load_model_config(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not supported; supported: gpt2"),
        ({"tokenizer.ggml.model": "llama"}, "the GGUF metadata has no tokenizer.ggml.scores"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre 'tekken' is not supported"),
    ],
)
def test_an_unknown_tokenizer_is_refused(
    metadata: dict[str, Any], message: str, make_tiny_model: MakeModel, write_gguf: WriteGguf
) -> None:
    with pytest.raises(DayshiftError, match=message):
        Tokenizer(write_gguf(make_tiny_model(), metadata=metadata))


def test_an_unknown_quantisation_is_named(make_tiny_model: MakeModel, write_gguf: WriteGguf) -> None:
    path = write_gguf(make_tiny_model(hidden_size=256, head_dim=64, intermediate_size=256), Q.TQ2_0)
    with pytest.raises(DayshiftError, match=r"is quantised as TQ2_0; supported are F32, F16"):
        weights_of(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9])
def test_a_file_cut_short_is_one_line(
    share: float, make_tiny_model: MakeModel, write_gguf: WriteGguf
) -> None:
    path = write_gguf(make_tiny_model())
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(DayshiftError, match="is not a readable GGUF file") as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value)


def test_a_changed_file_is_another_model(make_tiny_model: MakeModel, write_gguf: WriteGguf) -> None:
    folder = make_tiny_model()
    path = write_gguf(folder)
    before = model_identity(path, dtype=torch.float32)
    assert before == model_identity(path, dtype=torch.float32)
    assert before != model_identity(path, dtype=torch.bfloat16)
    write_gguf(folder, metadata={"tokenizer.chat_template": "{{ messages[0].content }}"})
    assert before != model_identity(path, dtype=torch.float32)


def test_a_folder_with_one_gguf_file_is_that_model(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    only = tmp_path / "one" / "model.gguf"
    only.touch()
    assert resolve_model(str(tmp_path / "one")) == resolve_model(str(only)) == only
    (tmp_path / "one" / "other.gguf").touch()
    with pytest.raises(
        DayshiftError, match=r"holds 2 GGUF files; give one of them: model\.gguf, other\.gguf"
    ):
        resolve_model(str(tmp_path / "one"))
    with pytest.raises(DayshiftError, match=r"model file .*missing\.gguf does not exist"):
        resolve_model(str(tmp_path / "missing.gguf"))
    (tmp_path / "weights.bin").touch()
    with pytest.raises(DayshiftError, match=r"is a file, but no \.gguf"):
        resolve_model(str(tmp_path / "weights.bin"))
