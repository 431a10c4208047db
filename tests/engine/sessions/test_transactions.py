"""Nothing is left behind by calls that end early, and nothing crosses between sessions."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import torch

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import SessionConfig, TokenLedger, TurnState
from tests.engine.driving import finish_reads, joined, run, take_turn, turn_request
from tests.engine.sessions.test_session_machine import first_layer_keys

NUM_BLOCKS = 64
BLOCK_BYTES = 16384  # of the tiny model


@pytest.fixture
def make_engine(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**fields: Any) -> Engine:
        config = EngineConfig(
            model=str(tiny_model_dir),
            device="cpu",
            num_kv_blocks=NUM_BLOCKS,
            window=160,
            host_kv_bytes=20 * BLOCK_BYTES,
            restore="read",
            store_dir=tmp_path,
            **fields,
        )
        engines.append(Engine(config))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_invariants()
        engine.close()


def open_session(engine: Engine, session_id: str) -> str:
    config = SessionConfig(session_id=session_id, system="Lead.", recall_budget=100)
    return engine.open_session(config).session_id


def held() -> tuple[int, int]:
    """File descriptors and threads of this process, but for those that only wait to be collected."""
    gc.collect()
    finish_reads()  # those of cancelled calls
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_a_thousand_cancels_leave_nothing_behind(make_engine: Callable[..., Engine]) -> None:
    """In every phase: queued, restoring, prefill in parts, decode, and a turn that waits for blocks."""
    engine = make_engine(max_num_batched_tokens=16)
    names = [open_session(engine, name) for name in ("a", "b", "c", "d")]
    for name in names:
        for at in range(5):
            take_turn(engine, turn_request(name, f"Lift the bowl {at}.", at=float(at), max_tokens=2))
    random = Random(0)

    def cancel(number: int) -> None:
        name = names[number % len(names)]
        if number % 7 == 0:
            engine.park_session(name)
        recall = (0.0, 2.0) if number % 3 == 0 else None
        request = turn_request(name, "Never answered, and long enough.", at=9.0, max_tokens=30, recall=recall)
        engine.submit(request)
        for _ in range(random.randrange(5)):
            engine.step()
        engine.cancel(request.request_id)
        assert not engine.has_work

    for number in range(100):
        cancel(number)
    before, rss = held(), psutil.Process().memory_info().rss
    turns = [engine.session(name).turns for name in names]
    for number in range(100, 1000):
        cancel(number)
    engine.check_invariants()
    assert held() == before
    assert psutil.Process().memory_info().rss - rss < 16 << 20
    for name in names:
        engine.park_session(name)
    assert engine.pool.num_free == NUM_BLOCKS
    assert [[t.text for t in engine.session(n).turns] for n in names] == [
        [t.text for t in ts] for ts in turns
    ]
    for name in names:
        assert take_turn(engine, turn_request(name, "Go on.", at=10.0)).ledger.recomputed == 0


def test_no_canary_crosses_between_a_hundred_sessions(make_engine: Callable[..., Engine]) -> None:
    """Calls at once in a pool for a few: all the others are parked, restored and evicted meanwhile."""
    engine = make_engine()
    names = [open_session(engine, f"s{number}") for number in range(100)]
    random = Random(1)
    for at in range(5):
        requests = {}
        for name in random.sample(names, len(names)):
            recall = (0.0, 1.0) if at == 4 else None
            request = turn_request(
                name, f"canary-{name}-{at} ends", at=float(at), max_tokens=2, recall=recall
            )
            engine.submit(request)
            requests[request.request_id] = name
        results = {requests[request_id]: joined(parts) for request_id, parts in run(engine).items()}
        assert set(results) == set(names)
        engine.check_invariants()
        for name in random.sample(names, 10):
            engine.park_session(name)
    assert engine.stats().num_tokens_from_archive > 0
    assert engine.stats().num_tokens_from_host > 0
    for name in names:
        info = engine.session(name)
        assert len(info.turns) == 5
        for turn in info.turns:
            assert f"canary-{name}-{turn.index} ends" in turn.text
            assert turn.text.count("canary") == 1
        context = engine.session_manager.get(name).context
        keys = engine.pool.read(context, 0, context.num_computed)[0, 0]
        torch.testing.assert_close(keys, first_layer_keys(engine, context.token_ids[: context.num_computed]))


def test_the_numbers_shown_are_the_numbers_counted(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    names = [open_session(engine, name) for name in ("a", "b", "c", "d")]
    ledgers: list[TokenLedger] = []
    for at in range(8):
        for name in names:
            recall = (0.0, 2.0) if at == 7 else None
            request = turn_request(name, f"Lift the bowl {at}.", at=float(at), recall=recall)
            ledgers.append(take_turn(engine, request).ledger)
            if at == 4:
                engine.park_session(name)
    engine.park_session("a")
    stats, infos = engine.stats(), {info.session_id: info for info in engine.sessions()}
    assert stats.num_prompt_tokens_computed == sum(ledger.computed + ledger.recomputed for ledger in ledgers)
    assert stats.num_generated_tokens == sum(ledger.generated for ledger in ledgers)
    assert stats.num_restored_tokens == sum(ledger.restored for ledger in ledgers) > 0
    assert stats.num_recalled_tokens == sum(ledger.recalled for ledger in ledgers) > 0
    assert stats.num_tokens_from_host + stats.num_tokens_from_archive == (
        stats.num_restored_tokens + stats.num_recalled_tokens
    )
    assert stats.num_parked_sessions == sum(info.is_parked for info in infos.values()) >= 1
    assert stats.num_free_kv_blocks == NUM_BLOCKS - sum(info.num_kv_blocks for info in infos.values())
    assert stats.num_host_kv_bytes % BLOCK_BYTES == 0
    assert 0 < stats.num_host_kv_bytes <= stats.max_host_kv_bytes
    for name, info in infos.items():
        by_state = {state: sum(t.num_tokens for t in info.turns if t.state is state) for state in TurnState}
        session = engine.session_manager.get(name)
        assert info.num_window_tokens == info.num_system_tokens + by_state[TurnState.WINDOW]
        assert info.num_recalled_tokens == by_state[TurnState.RECALLED]
        assert info.num_archived_tokens == by_state[TurnState.ARCHIVED] + by_state[TurnState.RECALLED]
        assert len(session.context.token_ids) == info.num_window_tokens + info.num_recalled_tokens
        assert (info.num_kv_blocks == 0) == info.is_parked
