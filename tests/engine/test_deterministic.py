"""With `deterministic`, a request's tokens and the bits of their logits are its own affair."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import (
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    SessionConfig,
)
from dayshift.engine.block_pool import Chunk, Context
from dayshift.engine.model_runner import ModelRunner
from dayshift.types import DayshiftError
from tests.engine.driving import joined, run, take_turn, turn_request

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama-untied": {"model_type": "llama", "head_dim": 32, "tie_word_embeddings": False},
    "qwen3-moe": {"model_type": "qwen3_moe"},
    "gpt-oss": {"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"]},
}
LENGTHS = (1, 5, 17, 34, 60)
NUM_TOKENS = 4
FEW = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass
class Served:
    """An engine, its prompts, and what each of them gives alone."""

    engine: Engine
    prompts: list[tuple[int, ...]]
    alone: list[GenerateResult]


def make_engine(model: Path, **fields: Any) -> Engine:
    return Engine(EngineConfig(model=str(model), deterministic=True, num_kv_blocks=200, **fields))


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param((name, "cpu"), id=name) for name in MODELS),
        *(pytest.param((name, "cuda"), id=f"{name}-cuda", marks=pytest.mark.gpu) for name in MODELS),
    ],
)
def served(request: pytest.FixtureRequest, make_tiny_model: Callable[..., Path]) -> Iterator[Served]:
    name, device = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    engine = make_engine(
        make_tiny_model(seed=5, num_hidden_layers=2, **MODELS[name]), device=device, max_num_seqs=6
    )
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(3, 500, (n,), generator=generator).tolist()) for n in LENGTHS]
    alone = [generate_together(engine, [(0, prompt)])[0] for prompt in prompts]
    yield Served(engine, prompts, alone)
    engine.close()


def generate_together(engine: Engine, prompts: list[tuple[int, tuple[int, ...]]]) -> list[GenerateResult]:
    """Each prompt joins after so many steps."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=5)
    late = sorted(enumerate(prompts), key=lambda item: item[1][0])
    chunks: dict[str, list[Any]] = {}
    step = 0
    while late or engine.has_work:
        while late and late[0][1][0] <= step:
            index, (_, prompt) = late.pop(0)
            engine.submit(GenerateRequest(request_id=f"r{index}", prompt_token_ids=prompt, sampling=sampling))
        for chunk in engine.step():
            chunks.setdefault(chunk.request_id, []).append(chunk)
        step += 1
    return [joined(chunks[f"r{index}"]) for index in range(len(prompts))]


def assert_same(actual: GenerateResult, expected: GenerateResult) -> None:
    assert actual.token_ids == expected.token_ids
    assert actual.logprobs == expected.logprobs  # floats of five candidates each: all bits of them


@FEW
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 8), st.integers(0, len(LENGTHS) - 1)), min_size=1, max_size=6),
    budget=st.integers(3, 200),
)
def test_neighbours_order_and_chunks_change_nothing(
    served: Served, arrivals: list[tuple[int, int]], budget: int
):
    scheduler = served.engine.scheduler
    usual = scheduler.max_num_batched_tokens
    scheduler.max_num_batched_tokens = budget + len(arrivals)
    try:
        results = generate_together(served.engine, [(step, served.prompts[i]) for step, i in arrivals])
    finally:
        scheduler.max_num_batched_tokens = usual
    for (_, index), result in zip(arrivals, results, strict=True):
        assert_same(result, served.alone[index])


@FEW
@given(data=st.data())
def test_every_logit_is_the_same_in_any_chunks(served: Served, data: st.DataObject):
    runner = served.engine.runner
    assert isinstance(runner, ModelRunner)
    prompt = list(served.prompts[3])

    def logits(ends: list[int]) -> torch.Tensor:
        """Of the last token, the prompt computed up to each of the ends in turn."""
        context = Context(prompt)
        runner.pool.reserve(context, len(prompt))
        rows = [
            runner.run([Chunk(context=context, num_tokens=end - start, needs_sampling=True)]).cpu()
            for start, end in pairwise([0, *ends, len(prompt)])
        ]
        runner.pool.release(context)
        return rows[-1]

    ends = sorted(data.draw(st.sets(st.integers(1, len(prompt) - 1), max_size=8)))
    assert torch.equal(logits(ends), logits([]))


def test_a_parked_session_goes_on_as_if_it_had_not_been(served: Served):
    """Beside others, too, and from KV that was read back."""
    engine = served.engine

    def talk(session_id: str, *, is_parked: bool) -> list[GenerateResult]:
        engine.open_session(SessionConfig(session_id=session_id, system="You lead a robot.", window=512))
        replies = []
        for turn, text in enumerate(["put the bowl on the plate", "what was given up?", "next"]):
            if is_parked:
                generate_together(engine, [(0, served.prompts[turn + 1])])
                engine.park_session(session_id)
                request = turn_request(session_id, text, at=turn, max_tokens=5)
                engine.submit(
                    GenerateRequest(
                        request_id="beside",
                        prompt_token_ids=served.prompts[3],
                        sampling=SamplingParams(max_tokens=9),
                    )
                )
                engine.submit(request)
                replies.append(joined(run(engine)[request.request_id]))
            else:
                replies.append(take_turn(engine, turn_request(session_id, text, at=turn, max_tokens=5)))
        engine.close_session(session_id)
        return replies

    before = engine.stats().num_tokens_from_host
    quiet, busy = talk("quiet", is_parked=False), talk("busy", is_parked=True)
    assert [reply.token_ids for reply in busy] == [reply.token_ids for reply in quiet]
    assert engine.stats().num_tokens_from_host > before


@pytest.mark.parametrize("kv_at_rest", ["int8", "rot4", "bf16"])
def test_kv_at_rest_that_loses_bits_is_refused(tiny_model_dir: Path, kv_at_rest: Any):
    with pytest.raises(DayshiftError, match=f"kv_at_rest {kv_at_rest}.*use exact"):
        make_engine(tiny_model_dir, kv_at_rest=kv_at_rest)
