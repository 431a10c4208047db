"""The engine's loop: batching, chunked prefill, admission, finishing, cancelling."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import (
    EngineOverloadedError,
    FinishReason,
    GenerateRequest,
    InvalidRequestError,
    SamplingParams,
)
from dayshift.engine.output import OutputText
from dayshift.engine.tokenizer import Tokenizer
from tests.engine.driving import generate, joined, run
from tests.engine.test_grammar import TOO_LARGE

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture
def make_engine(tiny_model_dir: Path) -> Callable[..., Engine]:
    def make(**fields: Any) -> Engine:
        fields = {"num_kv_blocks": 256, "device": "cpu"} | fields
        return Engine(EngineConfig(model=str(tiny_model_dir), **fields))

    return make


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 90, (count,), generator=generator).tolist()
    return [torch.randint(3, 512, (n,), generator=generator).tolist() for n in lengths]


def test_batched_and_chunked_equal_one_at_a_time(make_engine: Callable[..., Engine]) -> None:
    one = make_engine()
    expected = [generate(one, prompt, GREEDY).token_ids for prompt in prompts(12)]

    many = make_engine(max_num_batched_tokens=17, max_num_seqs=5, num_kv_blocks=40)
    for index, prompt in enumerate(prompts(12)):
        many.submit(GenerateRequest(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=GREEDY))
    chunks = run(many)

    assert [joined(chunks[str(index)]).token_ids for index in range(12)] == expected
    assert many.pool.num_free == 40


def test_greedy_equals_transformers(make_engine: Callable[..., Engine], tiny_model_dir: Path) -> None:
    from transformers import Qwen3ForCausalLM

    theirs = Qwen3ForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    tokens = prompts(1, seed=4)[0]
    ours = generate(make_engine(), tokens, GREEDY).token_ids
    for token_id in ours:
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens])).logits[0, -1].argmax().item()
        assert token_id == expected
        tokens.append(token_id)


def test_decodes_go_before_a_long_prompt(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    engine.submit(GenerateRequest(request_id="short", prompt_token_ids=(5, 6, 7), sampling=GREEDY))
    engine.step()
    engine.submit(GenerateRequest(request_id="long", prompt_token_ids=(9,) * 90, sampling=GREEDY))
    for _ in range(5):
        assert [chunk.request_id for chunk in engine.step()] == ["short"]


def test_a_prompt_is_whole_by_itself_and_in_chunks_beside_decodes(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(max_num_batched_tokens=100, max_num_tokens_beside_decodes=20)
    engine.submit(GenerateRequest(request_id="first", prompt_token_ids=(9,) * 90, sampling=GREEDY))
    assert [chunk.request_id for chunk in engine.step()] == ["first"]
    engine.submit(GenerateRequest(request_id="second", prompt_token_ids=(8,) * 90, sampling=GREEDY))
    num_steps = 0
    while "second" not in [chunk.request_id for chunk in engine.step()]:
        num_steps += 1
    assert num_steps == 4  # 19 tokens each; the fifth step computes the rest


def test_higher_priority_is_admitted_first(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_num_seqs=1)
    for name, priority in (("batch", 0), ("robot", 5), ("late", 0)):
        engine.submit(
            GenerateRequest(request_id=name, prompt_token_ids=(7, 8), sampling=GREEDY, priority=priority)
        )
    assert list(run(engine)) == ["robot", "batch", "late"]


def test_eos_ends_a_reply_and_length_cuts_it(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    for seed, prompt in enumerate(prompts(40, seed=9)):
        sampling = SamplingParams(max_tokens=40, temperature=3.0, seed=seed)
        free = generate(engine, prompt, sampling)
        forced = generate(engine, prompt, dataclasses.replace(sampling, ignore_eos=True))
        ends = [i for i, token_id in enumerate(forced.token_ids) if token_id in (0, 2)]
        if ends:
            assert free.finish_reason is FinishReason.STOP
            assert free.token_ids == forced.token_ids[: ends[0] + 1]
            return
        assert free.finish_reason is FinishReason.LENGTH
    pytest.fail("no prompt made the model produce an eos token")


def test_grammar_ends_with_the_value(make_engine: Callable[..., Engine]) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    result = generate(make_engine(), prompts(1)[0], SamplingParams(max_tokens=30, json_schema=schema))
    assert result.text in ('{"ok":true}', '{"ok":false}')
    assert result.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        # The one fails at a token that is taken, the other at a mask.
        (TOO_LARGE, "max is 2000"),
        ({"type": "string", "pattern": "^(.*[a-f].{300}|.*[g-z].{310}){5}$"}, "too many expressions"),
    ],
)
def test_a_grammar_that_fails_on_the_way_fails_its_request_alone(
    make_engine: Callable[..., Engine], schema: dict[str, Any], reason: str
) -> None:
    engine = make_engine()
    alone = generate(engine, prompts(2)[0], GREEDY)
    samplings = {
        "neighbour": GREEDY,
        "wrong": SamplingParams(max_tokens=900, temperature=2.0, seed=1, json_schema=schema),
    }
    for (request_id, sampling), prompt in zip(samplings.items(), prompts(2), strict=True):
        engine.submit(
            GenerateRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling)
        )
    chunks = run(engine)
    assert joined(chunks["neighbour"]).token_ids == alone.token_ids
    last = chunks["wrong"][-1]
    assert (last.finish_reason, last.is_request_wrong) == (FinishReason.ERROR, True)
    assert reason in str(last.error)
    engine.check_invariants()
    assert generate(engine, prompts(2)[0], GREEDY).token_ids == alone.token_ids


def test_same_seed_same_text_whatever_the_neighbours(make_engine: Callable[..., Engine]) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=0.9, seed=11, ignore_eos=True)
    engine = make_engine()
    alone = generate(engine, prompts(6)[0], sampling).token_ids
    for index, prompt in enumerate(prompts(6)):
        engine.submit(
            GenerateRequest(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling)
        )
    assert joined(run(engine)["0"]).token_ids == alone


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_cancel_in_every_phase_gives_the_blocks_back(
    num_steps: int, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    engine.submit(GenerateRequest(request_id="x", prompt_token_ids=(9,) * 40, sampling=GREEDY))
    for _ in range(num_steps):
        engine.step()
    engine.cancel("x")
    assert not engine.has_work
    assert engine.pool.num_free == 256
    assert generate(engine, (9,) * 40, GREEDY).token_ids  # the id and the blocks are usable again


def test_twice_as_many_requests_as_slots_are_all_answered(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_num_seqs=8, num_kv_blocks=32)
    for index in range(16):
        engine.submit(
            GenerateRequest(request_id=str(index), prompt_token_ids=(index + 3,) * 50, sampling=GREEDY)
        )
    chunks = run(engine)
    assert {len(joined(chunks[str(index)]).token_ids) for index in range(16)} == {12}


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        ({"prompt_token_ids": ()}, "the prompt is empty"),
        ({"prompt_token_ids": (512,)}, "token id 512 is outside the vocabulary of 512"),
        ({"prompt_token_ids": (3,) * 4090}, r"exceed the model's context of 4096 tokens"),
    ],
)
def test_what_can_never_run_is_refused(
    request_fields: dict[str, Any], message: str, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match=message):
        engine.submit(GenerateRequest(request_id="x", sampling=GREEDY, **request_fields))
    assert not engine.has_work


def test_full_queue_refuses(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_waiting=1)
    engine.submit(GenerateRequest(request_id="a", prompt_token_ids=(3,)))
    with pytest.raises(EngineOverloadedError, match="1 requests are waiting already"):
        engine.submit(GenerateRequest(request_id="b", prompt_token_ids=(3,)))


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="abé 🙂", min_size=1, max_size=30),
    stop=st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=3),
)
def test_pieces_never_hold_a_stop_string(tiny_model_dir: Path, text: str, stop: list[str]) -> None:
    tokenizer = Tokenizer(tiny_model_dir)
    output = OutputText(tokenizer, tuple(stop))
    sent = ""
    for token_id in tokenizer.encode(text):
        sent += output.push(token_id)
        if output.is_stopped:
            break
    sent += output.finish()
    ends = [(start + len(s), start) for s in stop if (start := text.find(s)) >= 0]
    assert sent == (text[: min(ends)[1]] if ends else text)
    assert output.text == sent
