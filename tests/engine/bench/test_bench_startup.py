"""The bench of starts: a whole server, from its command to its requests, and weights that it starts from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dayshift.engine.bench import dummy_models
from dayshift.engine.bench.startup import measure_startup
from dayshift.engine.models.loader import load_decoder
from dayshift.types import DayshiftError


def measure(model: Path, *options: str, timeout_s: float = 240.0):
    return measure_startup(
        ["serve", "--model", str(model), "--model-name", "bench", "--port", "0", *options],
        environment=os.environ | {"OMP_NUM_THREADS": "1"},
        vocab_size=512,
        num_requests=3,
        prompt=20,
        timeout_s=timeout_s,
    )


def test_a_server_is_timed_from_its_command_on(tiny_model_dir: Path) -> None:
    found = measure(tiny_model_dir, "--device", "cpu", "--kv-cache-gib", "0.01")
    assert 0.0 < found.parts_s["import"] < found.parts_s["total"] < found.ready_s < found.first_token_s
    assert found.parts_s["weights"] > 0.0
    assert len(found.ttft_ms) == 3


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(DayshiftError, match=r"ended before it was ready; it said: dayshift: .*nowhere"):
        measure(tmp_path / "nowhere")


def test_written_weights_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "eos_token_id": 500}
    shape = dummy_models.SHAPES["llama-3.1-8b"] | small
    monkeypatch.setitem(dummy_models.SHAPES, "small", shape)
    folder = dummy_models.write_shape("small", tmp_path)
    monkeypatch.setattr(dummy_models, "_SHARD_BYTES", 1 << 18)
    dummy_models.write_random_weights(folder)
    assert len(list(folder.glob("*.safetensors"))) > 2
    model = load_decoder(
        folder,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        num_positions=64,
        load_format="auto",
        seed=0,
    )
    assert all(parameter.any() for parameter in model.parameters())
