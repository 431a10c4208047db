"""One model over two processes (gloo, on a CPU) does what it does in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from dayshift.engine import Engine
from dayshift.engine.api import GenerateRequest, SamplingParams, SessionConfig
from dayshift.engine.block_pool import Context
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.scoring import score_next
from tests.engine.driving import joined, run, take_turn, turn_request
from tests.engine.sharded import TEXTS, config_of, opened, replies

MODELS = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe"},
    "gpt_oss": {"model_type": "gpt_oss"},  # biases, sinks, gate and up in one weight
}
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@dataclass(frozen=True)
class Pair:
    """The same model in one process, and over two."""

    one: Engine
    two: Engine


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, make_tiny_model: Callable[..., Path]) -> Iterator[Pair]:
    config = config_of(make_tiny_model(**MODELS[request.param]), run_ahead=True)
    with closing(Engine(config)) as one, opened(config) as two:
        yield Pair(one, two)


def log_probs(engine: Engine, token_ids: list[int]) -> torch.Tensor:
    """After each token, from a prefill and a chunk behind it."""
    assert isinstance(engine.runner, ModelRunner)
    context = Context(token_ids=token_ids)
    engine.pool.reserve(context, len(token_ids))
    parts = [score_next(engine.runner, context, number) for number in (50, len(token_ids) - 50)]
    engine.pool.release(context)
    return torch.cat(parts)


def test_logits_are_those_of_one_process(pair: Pair):
    token_ids = torch.randint(512, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    one, two = (log_probs(engine, list(token_ids)) for engine in (pair.one, pair.two))
    assert two.shape == (90, 512)
    torch.testing.assert_close(two, one, atol=1e-4, rtol=1e-4)


def test_kv_in_the_pool_has_all_heads_in_one_piece(pair: Pair):
    pieces = []
    for engine in (pair.one, pair.two):
        assert isinstance(engine.runner, ModelRunner)
        context = Context(token_ids=list(range(5, 45)))
        engine.pool.reserve(context, 40)
        score_next(engine.runner, context, 40)
        pieces.append(engine.pool.read(context, 3, 37))
        engine.pool.write(context, 0, pieces[0][:, :, :20])
        torch.testing.assert_close(engine.pool.read(context, 0, 20), pieces[0][:, :, :20], rtol=0, atol=0)
        engine.pool.release(context)
    assert pieces[0].shape == pieces[1].shape
    torch.testing.assert_close(pieces[1], pieces[0], atol=1e-4, rtol=1e-4)


def test_many_greedy_texts_are_those_of_one_process(pair: Pair):
    def texts(engine: Engine) -> dict[str, tuple[int, ...]]:
        for number in range(5):
            prompt = tuple(range(10 + number, 40 + 7 * number))
            engine.submit(
                GenerateRequest(
                    request_id=str(number),
                    prompt_token_ids=prompt,
                    sampling=replace(GREEDY, max_tokens=10 + 6 * number),
                )
            )
        return {request_id: joined(chunks).token_ids for request_id, chunks in run(engine).items()}

    assert texts(pair.two) == texts(pair.one)


def test_sessions_fork_park_and_recall_as_in_one_process(pair: Pair):
    def life(engine: Engine) -> list[tuple[int, ...]]:
        engine.open_session(SessionConfig(session_id="robot", window=200, recall_budget=200))
        said = replies(engine, TEXTS * 3)  # most leave the window
        engine.park_session("robot")
        recalling = take_turn(engine, turn_request("robot", "which?", 5.0, recall=(0.0, 1.0)))
        assert recalling.ledger.recalled > 0
        assert recalling.ledger.restored > 0
        engine.fork_session("robot", "other")
        said += [recalling.token_ids, *replies(engine, TEXTS[:2]), *replies(engine, TEXTS[2:], "other")]
        engine.close_session("robot")
        engine.close_session("other")
        engine.check_invariants()
        return said

    assert life(pair.two) == life(pair.one)
