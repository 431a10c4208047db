"""Every architecture and every kind of weights that the documentation lists, run on a GPU, against a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import SamplingParams, TokenLogprob
from dayshift.engine.models.convert import convert_model
from tests.engine.driving import generate
from tests.engine.test_decoder import MODELS
from tests.engine.test_fallback import neox as neox

pytestmark = pytest.mark.gpu

PROMPT = [7 * i % 500 + 3 for i in range(70)]  # longer than the windows of layers that have one
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1, ignore_eos=True)
NEAR = 0.03  # in log probabilities


def logprobs(
    model: Path, device: Literal["cpu", "cuda"], dtype: Literal["float32", "bfloat16"]
) -> tuple[TokenLogprob, ...]:
    """What a model says, token by token: a prompt, and decode steps."""
    engine = Engine(
        EngineConfig(model=str(model), device=device, dtype=dtype, num_kv_blocks=64, speculation="off")
    )
    try:
        return generate(engine, PROMPT, GREEDY).logprobs
    finally:
        engine.close()


def assert_says_the_same(model: Path) -> None:
    """In float32; texts may part where two tokens are equally likely."""
    said, expected = logprobs(model, "cuda", "float32"), logprobs(model, "cpu", "float32")
    assert len(said) == len(expected) == GREEDY.max_tokens
    for ours, theirs in zip(said, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=NEAR)
        if ours.token_id != theirs.token_id:
            break


@pytest.mark.parametrize("name", MODELS)
def test_an_architecture(name: str, make_tiny_model: Callable[..., Path]) -> None:
    model = make_tiny_model(seed=3, **MODELS[name])
    assert_says_the_same(model)
    assert len(logprobs(model, "cuda", "bfloat16")) == GREEDY.max_tokens


@pytest.mark.parametrize("weight_type", ["Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "MXFP4", "BF16"])
def test_a_gguf_file(weight_type: str, make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Quantised weights stay so on the GPU, and are unpacked on the CPU."""
    path = tmp_path / "model.gguf"
    convert_model(make_tiny_model(seed=3), path, weight_type)
    assert_says_the_same(path)


def test_gpt_oss_with_mxfp4_experts(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    convert_model(make_tiny_model(seed=3, model_type="gpt_oss"), path, "MXFP4")
    assert_says_the_same(path)


def test_the_transformers_fallback(neox: Path) -> None:
    assert_says_the_same(neox)
