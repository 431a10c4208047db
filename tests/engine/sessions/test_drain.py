"""Two engines on one store: listing, and draining one for the other."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dayshift.engine import Engine
from dayshift.engine.api import (
    EngineDrainingError,
    GenerateRequest,
    InvalidRequestError,
    SessionConfig,
    SessionLockedError,
)
from dayshift.engine.config import EngineConfig
from dayshift.engine.sessions.session_file import SessionFile, StoreFullError
from tests.engine.driving import joined, run, take_turn, turn_request


@pytest.fixture
def config(tiny_model_dir: Path, tmp_path: Path) -> EngineConfig:
    return EngineConfig(
        model=str(tiny_model_dir), kv_cache_bytes=4 << 20, window=400, restore="read", store_dir=tmp_path
    )


@pytest.fixture
def first(config: EngineConfig) -> Iterator[Engine]:
    engine = Engine(config)
    yield engine
    engine.close()


@pytest.fixture
def second(config: EngineConfig) -> Iterator[Engine]:
    engine = Engine(config)
    yield engine
    engine.close()


def with_a_turn(engine: Engine, text: str = "put the bowl on the plate") -> str:
    session_id = engine.open_session(SessionConfig()).session_id
    take_turn(engine, turn_request(session_id, text, 0.0))
    return session_id


def test_listing_shows_the_sessions_of_others_and_leaves_them_alone(first: Engine, second: Engine):
    session_id = with_a_turn(first)
    (seen,) = second.sessions()
    assert (seen.session_id, seen.is_parked) == (session_id, True)
    assert [turn.text for turn in seen.turns] == [turn.text for turn in first.session(session_id).turns]
    with pytest.raises(SessionLockedError):
        second.session(session_id)
    first.close_session(session_id)
    assert second.sessions() == []

    stored = second.open_session(SessionConfig()).session_id
    second.close()
    assert [info.session_id for info in first.sessions()] == [stored]
    third = Engine(first.config)
    assert third.session(stored).session_id == stored  # listing did not lock it
    third.close()


def test_a_drained_engine_has_let_go_of_everything(first: Engine, second: Engine):
    used, parked = with_a_turn(first), with_a_turn(first)
    first.park_session(parked)
    running = turn_request(with_a_turn(first), "still running", 1.0, max_tokens=20)
    first.submit(running)
    queued = GenerateRequest(request_id="queued", prompt_token_ids=(5, 6))
    first.submit(queued)
    first.drain()
    for refused in (
        lambda: first.submit(turn_request(used, "too late", 1.0)),
        lambda: first.submit(GenerateRequest(request_id="late", prompt_token_ids=(5,))),
        lambda: first.open_session(SessionConfig()),
    ):
        with pytest.raises(EngineDrainingError):
            refused()
    chunks = run(first)
    assert len(joined(chunks[running.request_id]).token_ids) == 20
    assert joined(chunks["queued"]).token_ids
    stats = first.stats()
    assert (stats.num_open_sessions, stats.num_free_kv_blocks) == (0, stats.num_kv_blocks)

    replies = [take_turn(second, turn_request(session_id, "go on", 2.0)) for session_id in (used, parked)]
    assert replies[0].token_ids == replies[1].token_ids
    assert all(reply.ledger.restored > 0 and reply.ledger.recomputed == 0 for reply in replies)
    assert len(second.session(running.session_id).turns) == 2
    with pytest.raises(EngineDrainingError):
        first.session(used)


def test_kv_that_cannot_be_written_does_not_keep_a_session(
    first: Engine, second: Engine, monkeypatch: pytest.MonkeyPatch, config: EngineConfig
):
    session_id, twin = with_a_turn(first), with_a_turn(second)

    def full(*_: object) -> None:
        raise StoreFullError("no space")

    with monkeypatch.context() as faulty:
        faulty.setattr(SessionFile, "append_kv", full)
        first.drain()
        run(first)
    assert first.stats().num_free_kv_blocks == first.stats().num_kv_blocks
    moved = take_turn(second, turn_request(session_id, "go on", 2.0))
    stayed = take_turn(second, turn_request(twin, "go on", 2.0))
    assert moved.token_ids == stayed.token_ids
    assert moved.ledger.recomputed > 0


def test_sessions_in_memory_cannot_be_drained(config: EngineConfig):
    engine = Engine(replace(config, store_dir=None))
    with pytest.raises(InvalidRequestError, match="in memory only"):
        engine.drain()
    assert with_a_turn(engine)
    engine.close()
