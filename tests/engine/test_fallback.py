"""Architectures that our decoder does not know, through `transformers`, by the engine's own API."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import GenerateRequest, InvalidRequestError, SamplingParams, SessionConfig
from dayshift.engine.models.fallback import FallbackPool
from dayshift.types import DayshiftError
from tests.engine.driving import generate, joined, run

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def neox(make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-NeoX with the tiny models' tokenizer."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    folder = tmp_path_factory.mktemp("neox")
    shutil.copytree(make_tiny_model(), folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    config = GPTNeoXConfig.from_dict(
        {
            "vocab_size": 512,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 256,
            "initializer_range": 0.3,
            "eos_token_id": 2,
        }
    )
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    return folder


def open_engine(folder: Path) -> Engine:
    return Engine(EngineConfig(model=str(folder), device="cpu", num_kv_blocks=64, max_num_batched_tokens=24))


def test_answers_are_those_of_transformers(neox: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(neox, dtype=torch.float32).eval()
    engine = open_engine(neox)
    assert "GPTNeoXForCausalLM runs on the transformers fallback: slower" in caplog.text
    prompts = [[5, 9, 200, 31] * 20, [7, 8, 9]]  # longer than a step; both are run together
    for index, prompt in enumerate(prompts):
        engine.submit(GenerateRequest(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=GREEDY))
    chunks = run(engine)
    for index, prompt in enumerate(prompts):
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False
        )
        assert joined(chunks[str(index)]).token_ids == tuple(expected[0, len(prompt) :].tolist())
    assert isinstance(engine.pool, FallbackPool)
    assert engine.pool.caches == {}
    assert engine.pool.num_free == 64
    engine.close()


def test_a_cancelled_request_leaves_no_cache(neox: Path) -> None:
    engine = open_engine(neox)
    engine.submit(GenerateRequest(request_id="a", prompt_token_ids=(1, 2, 3), sampling=GREEDY))
    engine.step()
    assert isinstance(engine.pool, FallbackPool)
    assert len(engine.pool.caches) == 1
    engine.cancel("a")
    assert engine.pool.caches == {}
    assert generate(engine, [1, 2, 3], GREEDY).token_ids
    engine.close()


def test_sessions_are_refused_with_the_reason(neox: Path) -> None:
    engine = open_engine(neox)
    reason = "runs on the transformers fallback, which keeps no sessions .*model_type 'gpt_neox'"
    with pytest.raises(InvalidRequestError, match=reason):
        engine.open_session(SessionConfig(system="You lead a robot."))
    engine.close()


def test_an_option_that_our_decoder_lacks_is_enough(make_tiny_model: Callable[..., Path]) -> None:
    folder = make_tiny_model(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    engine = open_engine(folder)
    assert isinstance(engine.pool, FallbackPool)
    assert len(generate(engine, [1, 2, 3], GREEDY).token_ids) == 12
    engine.close()


def test_what_transformers_does_not_know_either_is_one_line(neox: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(neox, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "nobody_knows"}))
    with pytest.raises(
        DayshiftError, match="neither our decoder nor transformers knows this model"
    ) as caught:
        open_engine(folder)
    assert "\n" not in str(caught.value)


def test_quantised_kv_is_refused(neox: Path) -> None:
    config = EngineConfig(model=str(neox), device="cpu", num_kv_blocks=64, kv_cache_dtype="int8")
    with pytest.raises(DayshiftError, match="kv_cache_dtype int8 needs a model that runs on our own decoder"):
        Engine(config)
