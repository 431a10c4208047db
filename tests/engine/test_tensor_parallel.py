"""One model over two processes (gloo, on a CPU) does what it does in one."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import torch
import torch.distributed as dist

from dayshift.engine import Engine
from dayshift.engine.api import GenerateRequest, SamplingParams, SessionConfig
from dayshift.engine.block_pool import Context
from dayshift.engine.config import EngineConfig
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.scoring import score_next
from dayshift.engine.server.run import ServerOptions, running_server
from dayshift.engine.tensor_parallel import workers as workers_module
from dayshift.engine.wire import EngineDiedError
from dayshift.types import DayshiftError
from tests.engine.driving import joined, run, take_turn, turn_request

MODELS = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe"},
    "gpt_oss": {"model_type": "gpt_oss"},  # biases, sinks, gate and up in one weight
}
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
TEXTS = ["put the bowl on the plate", "Result: failed, attempt 1 of 2.", "turn on the stove", "and now?"]


def config_of(folder: Path, **fields: object) -> EngineConfig:
    return replace(
        EngineConfig(model=str(folder), kv_cache_bytes=8 << 20, window=600, restore="read"), **fields
    )


def workers_of(pid: int) -> list[int]:
    """The workers that a process has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"dayshift.engine.tensor_parallel.worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@contextmanager
def opened(config: EngineConfig) -> Iterator[Engine]:
    """An engine over two processes, which leaves neither a process nor a group behind."""
    engine = Engine(replace(config, tensor_parallel=2))
    workers = workers_of(os.getpid())
    assert len(workers) == 1
    try:
        yield engine
    finally:
        engine.close()
        assert not any(map(is_alive, workers))
        assert not dist.is_initialized()


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


def replies(engine: Engine, texts: list[str], session_id: str = "robot") -> list[tuple[int, ...]]:
    return [take_turn(engine, turn_request(session_id, text, 0.0)).token_ids for text in texts]


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


def test_a_session_parked_by_two_processes_goes_on_in_one_and_back(tiny_model_dir: Path, tmp_path: Path):
    config = config_of(tiny_model_dir, store_dir=tmp_path)
    with closing(Engine(replace(config, store_dir=None))) as engine:
        engine.open_session(SessionConfig(session_id="robot"))
        expected = replies(engine, TEXTS)

    with opened(config) as two:
        two.open_session(SessionConfig(session_id="robot"))
        assert replies(two, TEXTS[:2]) == expected[:2]
    with closing(Engine(config)) as one:
        turn = take_turn(one, turn_request("robot", TEXTS[2], 0.0))
        assert (turn.token_ids, turn.ledger.recomputed) == (expected[2], 0)
        assert turn.ledger.restored > 0
    with opened(config) as two:
        turn = take_turn(two, turn_request("robot", TEXTS[3], 0.0))
        assert (turn.token_ids, turn.ledger.recomputed) == (expected[3], 0)
        assert turn.ledger.restored > 0


def test_a_model_that_cannot_be_split_is_refused_in_one_line(make_tiny_model: Callable[..., Path]):
    config = config_of(make_tiny_model(num_hidden_layers=1), tensor_parallel=4)
    with pytest.raises(
        DayshiftError, match=r"^tensor_parallel 4 does not divide .* num_key_value_heads of 2$"
    ):
        Engine(config)
    assert workers_of(os.getpid()) == []


def test_a_part_that_cannot_be_loaded_is_reported_and_nothing_is_left(tiny_model_dir: Path):
    config = config_of(tiny_model_dir, tensor_parallel=2, kv_cache_bytes=1)
    with pytest.raises(
        DayshiftError, match=r"^kv_cache_bytes 1 is less than one KV block|^rank 1 .*less than"
    ):
        Engine(config)
    assert workers_of(os.getpid()) == []
    assert not dist.is_initialized()


def test_a_worker_that_ends_is_one_clear_error(tiny_model_dir: Path):
    engine = Engine(config_of(tiny_model_dir, tensor_parallel=2))
    engine.submit(GenerateRequest(request_id="a", prompt_token_ids=(5, 6, 7), sampling=GREEDY))
    engine.step()
    (worker,) = workers_of(os.getpid())
    os.kill(worker, signal.SIGKILL)
    message = r"^rank 1 of the model's processes ended \(exit code -9\)$"
    with pytest.raises(EngineDiedError, match=message):
        run(engine)
    engine.submit(GenerateRequest(request_id="b", prompt_token_ids=(5,), sampling=GREEDY))
    with pytest.raises(EngineDiedError, match=message):
        run(engine)
    engine.close()
    assert not is_alive(worker)
    assert not dist.is_initialized()


def test_a_worker_that_hangs_is_ended_and_reported(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers_module, "PING_EVERY_S", 0.2)
    monkeypatch.setattr(workers_module, "ANSWER_TIMEOUT_S", 3.0)
    engine = Engine(config_of(tiny_model_dir, tensor_parallel=2))
    (worker,) = workers_of(os.getpid())
    os.kill(worker, signal.SIGSTOP)
    engine.submit(GenerateRequest(request_id="a", prompt_token_ids=(5, 6, 7), sampling=GREEDY))
    with pytest.raises(EngineDiedError, match=r"^rank 1 of the model's processes has not answered for 3 s$"):
        run(engine)
    engine.close()
    assert not is_alive(worker)


def test_an_idle_server_reports_a_worker_that_ended_and_leaves_no_process(tiny_model_dir: Path):
    config = config_of(tiny_model_dir, tensor_parallel=2)
    with running_server(config, ServerOptions(port=0, model_name="tiny")) as url:
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": "put", "max_tokens": 4}, timeout=60)
        assert reply.status_code == 200, reply.text
        children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
        pids = {int(pid) for path in children for pid in path.read_text().split()}
        core = next(pid for pid in pids if workers_of(pid))
        (worker,) = workers_of(core)
        os.kill(worker, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while httpx.get(f"{url}/health").status_code == 200:
            assert time.monotonic() < deadline, "a minute, and still healthy"
            time.sleep(0.2)
        reason = httpx.get(f"{url}/health").json()["reason"]
        assert re.search(r"rank 1 .* ended \(exit code -9\)|exit code 70", reason), reason
    assert not is_alive(core)
    assert not is_alive(worker)
