"""Several engines on one store: one writes a session at a time, and a stale one is refused."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import FinishReason, SessionConfig, SessionLockedError, SessionNotFoundError
from dayshift.engine.sessions import record_writer
from dayshift.engine.sessions.lease import Lease, LeaseFile
from dayshift.engine.sessions.records import LayoutRecord
from dayshift.engine.sessions.session_file import SessionFile
from dayshift.engine.sessions.store import SessionStore
from tests.engine.driving import run, take_turn, turn_request
from tests.engine.store.samples import (
    IDENTITY,
    SESSION,
    make_piece,
    make_turn,
    path_of,
    same_piece,
    write_sample,
)


def epoch_of(store: SessionStore) -> int | None:
    return LeaseFile(store.root / "s.lease").epoch()


def test_every_opening_raises_the_epoch(store: SessionStore) -> None:
    write_sample(store)
    assert epoch_of(store) == 1
    for epoch in (2, 3, 4):
        with store.open("s"):
            assert epoch_of(store) == epoch
    store.delete("s")
    assert list(store.root.iterdir()) == []


def test_a_writer_that_was_replaced_is_refused_and_writes_nothing(store: SessionStore) -> None:
    turns, piece, _ = write_sample(store)
    stale = store.open("s")
    SessionStore(store.root, IDENTITY).take_over("s")
    successor = store.open("s")
    successor.append_turn(make_turn(3))
    before = path_of(store).read_bytes()
    for append in (
        lambda: stale.append_turn(make_turn(3)),
        lambda: stale.append_kv(0, make_piece(50)),
        lambda: stale.append_layout(LayoutRecord(num_turns=0, window_turns=(), recalled_turns=())),
    ):
        with pytest.raises(SessionLockedError, match="taken over by another engine"):
            append()
    assert stale.is_lost
    assert path_of(store).read_bytes() == before
    assert successor.turns == [*turns, make_turn(3)]
    assert same_piece(successor.read_kv(1), piece)
    stale.close()
    successor.append_turn(make_turn(4))
    successor.close()
    with store.open("s") as file:
        assert file.turns == [*turns, make_turn(3), make_turn(4)]


def test_what_is_acknowledged_during_a_takeover_is_in_the_successors_file(store: SessionStore) -> None:
    """A writer appends as fast as it can while the session is taken from it, again and again."""
    for round_number in range(5):
        session_id = f"s{round_number}"
        store.create(replace(SESSION, session_id=session_id)).close()
        writer = store.open(session_id)
        acknowledged: list[int] = []

        thread = threading.Thread(target=append_until_lost, args=(writer, acknowledged))
        thread.start()
        while len(acknowledged) < 3:
            time.sleep(0.001)
        store.take_over(session_id)
        thread.join()
        writer.close()
        with store.open(session_id) as successor:
            assert len(acknowledged) <= len(successor.turns) <= len(acknowledged) + 1


def append_until_lost(writer: SessionFile, acknowledged: list[int]) -> None:
    while not writer.is_lost:
        index = len(acknowledged)
        with contextlib.suppress(SessionLockedError):
            writer.append_turn(make_turn(index, 5000))
            acknowledged.append(index)


def test_a_lock_that_was_lost_does_not_let_two_write(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system that forgets locks: both believe that they hold it."""
    turns, _, _ = write_sample(store)
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    first = store.open("s")
    second = SessionStore(store.root, IDENTITY).open("s")
    second.append_turn(make_turn(3))
    with pytest.raises(SessionLockedError, match="epoch 3, this writer's is 2"):
        first.append_turn(make_turn(3, 9000))
    first.close()
    second.append_turn(make_turn(4))
    second.close()
    with store.open("s") as file:
        assert file.turns == [*turns, make_turn(3), make_turn(4)]


def test_a_writer_replaced_between_its_write_and_its_answer_does_not_acknowledge(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, _, _ = write_sample(store)
    stale = store.open("s")
    write = record_writer.RecordWriter._write

    def write_then_lose(*args: object) -> None:
        write(*args)  # type: ignore[arg-type]
        store.take_over("s")

    with monkeypatch.context() as patch:
        patch.setattr(record_writer.RecordWriter, "_write", write_then_lose)
        with pytest.raises(SessionLockedError, match="taken over"):
            stale.append_turn(make_turn(3))
    assert stale.turns == turns
    stale.close()
    with store.open("s") as file:  # not acknowledged, so it may be there or not; here it came before the copy
        assert file.turns == [*turns, make_turn(3)]


@pytest.mark.parametrize("damage", [b"", b"DSSL", b"\0" * 16, None])
def test_a_lost_or_damaged_lease_file_does_not_take_the_epoch_back(
    store: SessionStore, damage: bytes | None
) -> None:
    turns, _, _ = write_sample(store)
    for index in (3, 4):
        with store.open("s") as file:
            file.append_turn(make_turn(index))
    lease = store.root / "s.lease"
    lease.unlink()
    if damage is not None:
        lease.write_bytes(damage)
    with store.open("s") as file:
        file.append_turn(make_turn(5))
    assert epoch_of(store) == 4
    with store.open("s") as file:
        assert file.turns == [*turns, make_turn(3), make_turn(4), make_turn(5)]


def test_a_session_that_is_not_there_cannot_be_taken(store: SessionStore) -> None:
    with pytest.raises(SessionNotFoundError):
        store.take_over("none")


def test_lease_errors_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(SessionLockedError) as caught:
        Lease(LeaseFile(tmp_path / "x.lease"), 1).check()
    assert str(caught.value).count("\n") == 0
    assert "unknown" in str(caught.value)


def test_an_engine_that_lost_a_session_fails_the_call_and_opens_it_again_later(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = EngineConfig(model=str(tiny_model_dir), device="cpu", num_kv_blocks=128, store_dir=tmp_path)
    first, second = Engine(config), Engine(config)
    session_id = first.open_session(SessionConfig(system="You lead.", window=400)).session_id
    take_turn(first, turn_request(session_id, "One.", at=1.0))
    SessionStore(tmp_path).take_over(session_id)  # as the operator does while `first` hangs
    take_turn(second, turn_request(session_id, "Two.", at=2.0))

    late = turn_request(session_id, "Never taken.", at=3.0)
    first.submit(late)
    last = run(first)[late.request_id][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert "taken over" in last.error
    with pytest.raises(SessionLockedError):  # the second engine has it
        first.session(session_id)
    assert first.pool.num_free == 128
    second.close()
    assert [turn.at for turn in first.session(session_id).turns] == [1.0, 2.0]
    take_turn(first, turn_request(session_id, "Three.", at=4.0))
    assert [turn.at for turn in first.session(session_id).turns] == [1.0, 2.0, 4.0]
    first.close()
