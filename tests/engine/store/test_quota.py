"""The store's quota: KV makes room for KV, oldest closed session first; text is always taken."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import SessionConfig
from dayshift.engine.sessions.session_file import StoreFullError
from dayshift.engine.sessions.store import SessionStore
from tests.engine.driving import take_turn, turn_request
from tests.engine.store.samples import IDENTITY, SESSION, make_piece, make_turn, path_of, same_piece

PIECE = make_piece(200, seed=7)  # 38,400 bytes
QUOTA = 180_000  # three such sessions, and the text of some more


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "sessions", IDENTITY, quota_bytes=QUOTA)


def add_session(store: SessionStore, session_id: str, written_at: float) -> None:
    with store.create(replace(SESSION, session_id=session_id)) as file:
        file.append_turn(make_turn(0))
        file.append_kv(0, PIECE)
    os.utime(path_of(store, session_id), (written_at, written_at))


def with_kv(store: SessionStore) -> set[str]:
    found = set()
    for session_id in store.list_session_ids():
        with store.peek(session_id) as file:
            assert file.turns == [make_turn(0)]  # text is never evicted
            if file.has_kv(0):
                assert same_piece(file.read_kv(0), PIECE)
                found.add(session_id)
    return found


def test_the_oldest_closed_sessions_lose_their_kv_first(store: SessionStore) -> None:
    for age, session_id in enumerate(("oldest", "older", "young")):
        add_session(store, session_id, written_at=1000.0 + age)
    assert with_kv(store) == {"oldest", "older", "young"}
    add_session(store, "new", written_at=2000.0)
    assert with_kv(store) == {"older", "young", "new"}
    with store.open("older"):  # referenced
        add_session(store, "newer", written_at=3000.0)
        assert with_kv(store) == {"older", "new", "newer"}
    assert store.counters.num_evicted_sessions == 2
    assert store.num_bytes <= QUOTA
    with store.open("oldest") as file:
        file.append_kv(0, PIECE)  # computed again, and kept again
        assert same_piece(file.read_kv(0), PIECE)


def test_a_rewritten_session_keeps_its_age(store: SessionStore) -> None:
    for age, session_id in enumerate(("a", "b", "c", "d")):
        add_session(store, session_id, written_at=1000.0 + age)
    assert path_of(store, "a").stat().st_mtime == 1000.0


def test_without_closed_sessions_kv_is_refused_and_text_is_taken(store: SessionStore) -> None:
    with store.create(SESSION) as file:
        for index in range(4):
            file.append_turn(make_turn(index))
        for index in range(3):
            file.append_kv(index, PIECE)
        with pytest.raises(StoreFullError, match="do not fit into the quota of 180000 bytes") as caught:
            file.append_kv(3, PIECE)
        assert caught.value.status == 507
        for index in range(4, 40):
            file.append_turn(make_turn(index, 3000))
        assert not file.has_kv(3)
        assert same_piece(file.read_kv(2), PIECE)
    assert store.num_bytes > QUOTA
    with store.open("s") as file:
        assert len(file.turns) == 40


def test_an_engine_over_its_quota_computes_again_what_it_could_not_keep(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = EngineConfig(
        model=str(tiny_model_dir),
        device="cpu",
        num_kv_blocks=128,
        store_dir=tmp_path,
        store_quota_bytes=20_000,
        host_kv_bytes=0,
        restore="read",
    )
    engine = Engine(config)
    session_id = engine.open_session(SessionConfig(system="You lead.", window=400)).session_id
    take_turn(engine, turn_request(session_id, "One.", at=1.0))
    engine.park_session(session_id)
    result = take_turn(engine, turn_request(session_id, "Two.", at=2.0))
    assert result.ledger.recomputed > 0
    assert engine.stats().num_lost_kv_pieces > 0
    assert [turn.at for turn in engine.session(session_id).turns] == [1.0, 2.0]
    engine.close()
