"""The processes of a model over several devices: sessions outlive them, and their end is reported."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch.distributed as dist

from dayshift.engine import Engine
from dayshift.engine.api import GenerateRequest, SamplingParams, SessionConfig
from dayshift.engine.server.run import ServerOptions, running_server
from dayshift.engine.tensor_parallel import workers as workers_module
from dayshift.engine.tensor_parallel.sharded import ShardedRunner
from dayshift.engine.wire import EngineDiedError
from dayshift.types import DayshiftError
from tests.engine.driving import run, take_turn, turn_request
from tests.engine.sharded import TEXTS, config_of, is_alive, opened, replies, workers_of

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


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


def test_a_step_that_fails_here_ends_the_group_whose_ranks_no_longer_meet(tiny_model_dir: Path):
    engine = Engine(config_of(tiny_model_dir, tensor_parallel=2))
    (worker,) = workers_of(os.getpid())
    assert isinstance(engine.runner, ShardedRunner)
    del engine.runner.model.norm
    engine.submit(GenerateRequest(request_id="a", prompt_token_ids=(5, 6, 7), sampling=GREEDY))
    with pytest.raises(AttributeError, match="norm"):
        run(engine)
    with pytest.raises(EngineDiedError, match=r"^rank 0 failed in the midst of a step: AttributeError$"):
        run(engine)
    with suppress(EngineDiedError):  # what was running cannot be finished
        engine.close()
    assert not is_alive(worker)


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
        assert reason == "rank 1 of the model's processes ended (exit code -9)"
    assert not is_alive(core)
    assert not is_alive(worker)
