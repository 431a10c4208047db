"""Disks that hang, fail or lack features: KV is given up, text is kept, and it is counted."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import SessionConfig, SessionLockedError
from dayshift.engine.sessions import payload_io
from dayshift.engine.sessions.archive import KVUnavailableError
from dayshift.engine.sessions.payload_io import can_direct
from dayshift.engine.sessions.session_file import StoreCorruptError, StoreFullError
from dayshift.engine.sessions.store import SessionStore
from tests.engine.driving import take_turn, turn_request
from tests.engine.store.samples import (
    IDENTITY,
    SESSION,
    file_size_limit,
    make_piece,
    make_turn,
    path_of,
    same_piece,
    write_sample,
)


@pytest.fixture
def hung_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reads of KV payloads hang until the test ends."""
    end_of_test = threading.Event()
    read_all = payload_io.record_format.read_all

    def hang(fd: int, buffer: memoryview, offset: int, num_needed: int | None = None) -> None:
        if threading.current_thread().name == "dayshift-kv-read":
            end_of_test.wait()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        read_all(fd, buffer, offset, num_needed)

    monkeypatch.setattr(payload_io.record_format, "read_all", hang)
    yield
    end_of_test.set()


def test_a_read_that_hangs_is_given_up_after_the_deadline(store: SessionStore, hung_reads: None) -> None:
    turns, _, _ = write_sample(store)
    patient = SessionStore(store.root, IDENTITY, read_deadline_s=0.05)
    with patient.open("s") as file:
        with pytest.raises(KVUnavailableError, match=r"no answer to a read within 0.05 s"):
            file.read_kv(1)
        assert patient.counters.num_late_reads == 1
        assert not file.has_kv(1)
        assert file.turns == turns
        file.append_turn(make_turn(3))


def test_an_engine_computes_again_what_its_disk_does_not_give(
    tiny_model_dir: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def config(**fields: object) -> EngineConfig:
        return EngineConfig(model=str(tiny_model_dir), device="cpu", num_kv_blocks=128, **fields)  # type: ignore[arg-type]

    plain = Engine(config())
    expected_id = plain.open_session(SessionConfig(system="You lead.", window=400)).session_id
    expected = [take_turn(plain, turn_request(expected_id, f"{i}.", at=float(i))).token_ids for i in range(3)]
    plain.close()

    engine = Engine(config(store_dir=tmp_path, store_read_deadline_s=0.05, host_kv_bytes=0, restore="read"))
    session_id = engine.open_session(SessionConfig(system="You lead.", window=400)).session_id
    got = [take_turn(engine, turn_request(session_id, f"{i}.", at=float(i))).token_ids for i in range(2)]
    engine.park_session(session_id)
    request.getfixturevalue("hung_reads")
    last = take_turn(engine, turn_request(session_id, "2.", at=2.0))
    assert [*got, last.token_ids] == expected
    assert last.ledger.restored == 0
    assert last.ledger.recomputed > 0
    stats = engine.stats()
    assert stats.num_late_kv_reads == stats.num_refused_kv_pieces
    assert 1 <= stats.num_late_kv_reads <= 2  # at once; what stands behind them is not waited for
    engine.close()


def test_openings_that_fail_leave_no_descriptor_behind(store: SessionStore) -> None:
    write_sample(store)
    path_of(store, "junk").write_bytes(b"junk" * 2000)
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        for attempt in (store.open, store.peek):
            with pytest.raises(StoreCorruptError):
                attempt("junk")
        with file_size_limit(100), pytest.raises(StoreFullError):
            store.create(replace(SESSION, session_id="new"))
        with store.open("s"), pytest.raises(SessionLockedError):
            store.open("s")
        store.peek("s").close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_kv_passes_the_page_cache_where_the_file_system_can(store: SessionStore) -> None:
    """The same bytes either way, also from one to the other."""
    pieces = [make_piece(num_tokens, seed=num_tokens) for num_tokens in (0, 1, 20, 21, 100)]
    other = SessionStore(store.root, IDENTITY)
    other.is_direct = False
    with store.create(SESSION) as file:
        for index, piece in enumerate(pieces):
            file.append_turn(make_turn(index))
            file.append_kv(index, piece)
    for reader in (store, other):
        with reader.open("s") as file:
            assert all(same_piece(file.read_kv(index), piece) for index, piece in enumerate(pieces))
            file.append_kv(0, make_piece(77))
            assert same_piece(file.read_kv(0), make_piece(77))
        pieces[0] = make_piece(77)


def test_a_file_system_without_direct_access_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse(path: str, flags: int, *args: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    assert not can_direct(tmp_path)
    assert list(tmp_path.iterdir()) == []
    store = SessionStore(tmp_path, IDENTITY)
    assert not store.is_direct
    _, piece, _ = write_sample(store)
    with store.open("s") as file:
        assert same_piece(file.read_kv(1), piece)


_WRITER = """
import os, signal, sys
from pathlib import Path
from tests.engine.store.samples import SESSION, IDENTITY, make_piece, make_turn
from dayshift.engine.sessions.store import SessionStore

store = SessionStore(Path(sys.argv[1]), IDENTITY)
file = store.create(SESSION)
real, left = os.pwrite, int(sys.argv[2])

def pwrite(fd, data, offset):
    global left
    if len(data) > left:  # killed in the middle of this write
        with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as torn:
            torn.seek(offset)
            torn.write(bytes(data)[:left])
        os.kill(os.getpid(), signal.SIGKILL)
    left -= len(data)
    return real(fd, data, offset)

os.pwrite = pwrite
for index in range(100):
    file.append_turn(make_turn(index, 5000 * (index % 2)))
    print("turn", index, flush=True)
    file.append_kv(index, make_piece(30 * (index % 3), seed=index))
    print("kv", index, flush=True)
"""


def kill_after(root: Path, num_bytes: int) -> None:
    """A writer is killed within the write that passes `num_bytes`; what it acknowledged must be there."""
    writer = subprocess.run(
        [sys.executable, "-c", _WRITER, str(root), str(num_bytes)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert writer.returncode == -signal.SIGKILL, writer.stderr
    acknowledged = [tuple(line.split()) for line in writer.stdout.splitlines()]
    num_turns = sum(kind == "turn" for kind, _ in acknowledged)
    num_pieces = sum(kind == "kv" for kind, _ in acknowledged)
    store = SessionStore(root, IDENTITY)
    with store.open("s") as file:
        assert num_turns <= len(file.turns) <= num_turns + 1
        assert file.turns == [make_turn(i, 5000 * (i % 2)) for i in range(len(file.turns))]
        for index in range(num_pieces):
            assert same_piece(file.read_kv(index), make_piece(30 * (index % 3), seed=index))
        file.append_turn(make_turn(len(file.turns)))
    store.delete("s")


@pytest.mark.parametrize("num_bytes", [0, 4_095, 30_000])
def test_a_kill_at_any_byte_loses_nothing_acknowledged(tmp_path: Path, num_bytes: int) -> None:
    kill_after(tmp_path, num_bytes)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_kill_at_very_many_bytes_loses_nothing_acknowledged(tmp_path: Path) -> None:
    for num_bytes in range(0, 120_000, 397):
        kill_after(tmp_path, num_bytes)
