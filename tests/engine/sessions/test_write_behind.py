"""KV is on disk before host memory needs the room, and nothing else is different."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import SessionConfig, TurnState
from dayshift.engine.sessions.host_pool import PieceKey
from dayshift.engine.sessions.records import KVPiece
from dayshift.engine.sessions.restore_cost import PrefillTime, ReadTime, RestoreCost
from dayshift.engine.sessions.session_file import SessionFile, StoreFullError
from dayshift.engine.sessions.stored_piece import Tier
from dayshift.engine.sessions.write_behind import WriteBehind
from tests.engine.driving import take_turn, turn_request

HOST_BLOCKS = 24
BLOCK_BYTES = 16384  # of the tiny model: 4 layers, 16 tokens
SLOW, AT_ONCE = ReadTime(10.0, 0.0), PrefillTime(((1, 0.0), (100, 0.0)))
NOTHING_IS_READ = RestoreCost({Tier.HOST: SLOW, Tier.ARCHIVE: SLOW}, AT_ONCE)


@pytest.fixture
def engine(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(
        EngineConfig(
            model=str(tiny_model_dir),
            device="cpu",
            num_kv_blocks=64,
            window=256,
            restore="read",
            host_kv_bytes=HOST_BLOCKS * BLOCK_BYTES,
            store_dir=tmp_path,
        )
    )
    yield engine
    engine.check_invariants()
    engine.close()
    assert not any(thread.name.startswith("dayshift-kv-write") for thread in threading.enumerate())


def park_some(engine: Engine, num_sessions: int, first: int = 0) -> list[str]:
    """Parked sessions of two turns each."""
    names = [
        engine.open_session(SessionConfig(session_id=f"robot-{i}", system="Lead.")).session_id
        for i in range(first, first + num_sessions)
    ]
    for name in names:
        for at in (0.0, 1.0):
            take_turn(engine, turn_request(name, f"Step {at} of {name}.", at=at))
        engine.park_session(name)
    return names


def hold_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """From now on writes of KV wait for the event."""
    may_write = threading.Event()
    append_kv = SessionFile.append_kv

    def late(self: SessionFile, turn: int, piece: KVPiece) -> None:
        assert may_write.wait(60)
        append_kv(self, turn, piece)

    monkeypatch.setattr(SessionFile, "append_kv", late)
    return may_write


def finish_writes(engine: Engine) -> None:
    behind = engine.tiers.write_behind
    assert behind is not None
    for key in list(engine.tiers.host):
        behind.wait(key)


def test_pieces_are_written_ahead_and_then_only_forgotten(engine: Engine) -> None:
    names = park_some(engine, 3)
    finish_writes(engine)
    behind = engine.tiers.write_behind
    assert behind is not None
    assert engine.stats().num_kv_pieces_written_ahead == behind.num_written > 0
    host, archive = engine.tiers.host, engine.session_manager.get(names[0]).archive
    oldest = next(iter(host))
    assert oldest[0] == names[0]
    assert archive.has_kv(oldest[1])  # there, and in host memory still
    for name in names:
        result = take_turn(engine, turn_request(name, "And now?", at=5.0))
        assert result.ledger.recomputed == 0
        assert result.ledger.restored > 0


def test_with_room_nothing_is_written(engine: Engine) -> None:
    (name,) = park_some(engine, 1)
    finish_writes(engine)
    assert engine.tiers.write_behind is not None
    assert engine.tiers.write_behind.num_written == 0
    assert not any(engine.session_manager.get(name).archive.has_kv(turn) for turn in (-1, 0, 1))


def test_a_session_that_is_deleted_while_it_is_written_leaves_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = hold_writes(monkeypatch)
    threading.Timer(0.2, may_write.set).start()
    names = park_some(engine, 3)  # its last evictions wait for the writes
    for name in names:
        engine.close_session(name)
    assert engine.sessions() == []
    assert engine.tiers.host.num_free == HOST_BLOCKS


def test_what_cannot_be_written_ahead_is_lost_only_when_it_has_to_leave(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: SessionFile, turn: int, piece: KVPiece) -> None:
        raise StoreFullError("no space")

    monkeypatch.setattr(SessionFile, "append_kv", full)
    names = park_some(engine, 2)
    while engine.tiers.host.num_free * 4 > HOST_BLOCKS:
        names += [engine.fork_session(names[0]).session_id]
        take_turn(engine, turn_request(names[-1], "More.", at=9.0))
        engine.park_session(names[-1])
    finish_writes(engine)
    assert engine.tiers.write_behind is not None
    assert engine.tiers.write_behind.num_written == 0
    assert take_turn(engine, turn_request(names[-1], "And now?", at=10.0)).ledger.recomputed == 0


def test_what_is_written_leaves_first(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step does not wait for the disk while anything else can leave."""
    names = park_some(engine, 2)
    host, behind = engine.tiers.host, engine.tiers.write_behind
    assert behind is not None
    assert behind.num_written == 0
    younger = engine.session_manager.get(names[1]).archive
    for key in host.keys_of(names[1]):
        younger.append_kv(key[1], host.read(key))
    may_write = hold_writes(monkeypatch)
    branch = engine.fork_session(names[0]).session_id
    at = 5.0
    while host.keys_of(names[1]):
        take_turn(engine, turn_request(branch, "More.", at=at))
        engine.park_session(branch)
        at += 1.0
    assert behind.num_waits == 0
    assert all(key in host for key in [(names[0], turn) for turn in (-1, 0, 1)])
    may_write.set()


def test_what_is_sooner_computed_than_read_does_not_wait_for_a_disk(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is dropped; turns that have left their windows are written, to be recalled."""
    may_write = hold_writes(monkeypatch)
    engine.tiers.cost = NOTHING_IS_READ
    names = park_some(engine, 7)
    behind, host = engine.tiers.write_behind, engine.tiers.host
    assert behind is not None
    assert behind.num_waits == 0
    assert engine.stats().num_dropped_kv_pieces > 0
    dropped = next(name for name in names if not host.keys_of(name))
    result = take_turn(engine, turn_request(dropped, "And now?", at=5.0))
    assert (result.ledger.recomputed > 0, result.ledger.restored) == (True, 0)
    assert len(engine.session(dropped).turns) == 3
    may_write.set()

    session = engine.session_manager.get(names[-1])
    key = (session.session_id, 0)
    session.entries = session.entries[1:]  # as if the window had moved on
    session.context.token_ids = session.layout_token_ids(session.entries)
    num_dropped = engine.stats().num_dropped_kv_pieces
    while key in host:
        engine.tiers._evict(1)
    assert session.archive.has_kv(0)
    assert not session.archive.has_kv(1)
    assert engine.stats().num_dropped_kv_pieces > num_dropped


@pytest.mark.parametrize(
    ("wish", "value", "none"), [("is_busy", True, False), ("retain_until", math.inf, 0.0)]
)
def test_a_session_that_is_about_to_need_it_or_asked_for_it_keeps_its_kv_for_longest(
    engine: Engine, wish: str, value: object, none: object
) -> None:
    """Many that call in turns would otherwise each find that theirs has just left for the one before."""
    names = park_some(engine, 3)
    finish_writes(engine)
    session = engine.session_manager.get(names[0])
    setattr(session, wish, value)
    host = engine.tiers.host
    assert next(iter(host))[0] == names[0]
    num_pieces = len(host.keys_of(names[0]))
    while host.keys_of(names[1]):
        engine.tiers._evict(1)
    assert len(host.keys_of(names[0])) == num_pieces
    setattr(session, wish, none)


def test_dropping_many_takes_nothing_from_those_that_wait(engine: Engine) -> None:
    engine.tiers.cost = NOTHING_IS_READ
    names = park_some(engine, 3)
    host = engine.tiers.host
    waiting = [engine.session_manager.get(name) for name in names[:2]]
    kept = [key for name in names[:2] for key in host.keys_of(name)]
    for session in waiting:
        session.is_busy = True
    engine.tiers._evict(100)
    assert engine.stats().num_dropped_kv_pieces > 0
    assert all(key in host for key in kept)
    for session in waiting:
        session.is_busy = False


def test_turns_that_are_about_to_leave_their_window_are_not_dropped(engine: Engine) -> None:
    """The session is parked when they leave: nothing could save them, or recall them as KV, any more."""
    engine.tiers.cost = NOTHING_IS_READ
    name = engine.open_session(SessionConfig(session_id="robot", system="Lead.", low_water=0.5)).session_id
    at = 0.0
    while engine.session(name).num_window_tokens < 224:  # of 256: the next turn is one too many
        take_turn(engine, turn_request(name, f"Step {at}: put the bowl on the plate.", at=at))
        at += 1.0
    assert all(turn.state is TurnState.WINDOW for turn in engine.session(name).turns)
    engine.park_session(name)
    host = engine.tiers.host
    while engine.stats().num_dropped_kv_pieces == 0:
        engine.tiers._evict(100)
    assert (name, 0) in host
    assert (name, -1) not in host
    moved_on = take_turn(engine, turn_request(name, "And now put the bowl on the stove.", at=at))
    assert moved_on.ledger.restored == 0
    assert engine.session(name).turns[0].state is TurnState.ARCHIVED
    recalled = take_turn(engine, turn_request(name, "What was first?", at=at + 1, recall=(0.0, 1.0)))
    assert recalled.ledger.recalled == engine.session(name).turns[0].num_tokens
    assert recalled.ledger.recomputed == 0


def test_what_leaves_next_is_written_first(engine: Engine) -> None:
    """It is not what was used longest ago, where that belongs to calls that wait."""
    names = park_some(engine, 2)
    first, second = map(engine.session_manager.get, names)
    first.is_busy = True
    park_some(engine, 1, first=2)
    finish_writes(engine)
    assert all(second.archive.has_kv(turn) for turn in (-1, 0, 1))
    assert not any(first.archive.has_kv(turn) for turn in (-1, 0, 1))
    first.is_busy = False


def test_writing_goes_on_between_steps(engine: Engine) -> None:
    """Also when nothing more is parked."""
    park_some(engine, 3)
    behind = engine.tiers.write_behind
    assert behind is not None
    session_id = engine.open_session(SessionConfig(system="Lead.")).session_id
    engine.submit(turn_request(session_id, "Go on.", at=0.0, max_tokens=60))
    while engine.has_work:
        engine.step()
        finish_some(behind)
    kept = list(engine.tiers.host)
    unwritten = [key for key in kept if not _is_written(engine, key)]
    assert unwritten == []


def finish_some(behind: WriteBehind) -> None:
    """Until the writes that run have ended."""
    for write in list(behind._writes.values()):
        write.result()


def _is_written(engine: Engine, key: PieceKey) -> bool:
    return engine.session_manager.get(key[0]).archive.has_kv(key[1])
