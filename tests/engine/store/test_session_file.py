"""A session's file: cut, damaged, foreign, killed while it is written, on a full disk."""

import dataclasses
import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine.api import (
    InvalidRequestError,
    SessionExistsError,
    SessionLockedError,
    SessionNotFoundError,
)
from dayshift.engine.sessions.archive import KVUnavailableError
from dayshift.engine.sessions.record_format import HEADER_BYTES, PAGE_BYTES, KVFormat
from dayshift.engine.sessions.records import KVPiece, SessionRecord, TurnRecord
from dayshift.engine.sessions.session_file import (
    SessionFile,
    StoreCorruptError,
    StoreError,
    StoreFullError,
)
from dayshift.engine.sessions.store import SessionStore
from tests.engine.store.samples import (
    IDENTITY,
    OTHER_IDENTITY,
    SESSION,
    file_size_limit,
    make_piece,
    make_turn,
    page_after,
    path_of,
    same_piece,
    write_sample,
)


def open_or_refusal(store: SessionStore) -> SessionFile | str:
    try:
        return store.open("s")
    except StoreCorruptError as error:
        return str(error)


def interesting_lengths(ends: list[int]) -> list[int]:
    """Every border of records and pages and its neighbourhood, and every 499th byte."""
    near = {end + delta for end in [0, *ends] for delta in range(-3, 4)}
    pages = {page + delta for page in range(0, ends[-1], PAGE_BYTES) for delta in (-1, 0, 1, HEADER_BYTES)}
    return sorted(n for n in near | pages | set(range(0, ends[-1], 499)) if 0 <= n <= ends[-1])


def test_a_file_cut_anywhere_keeps_exactly_the_records_that_are_whole(store: SessionStore):
    turns, piece, ends = write_sample(store)
    whole = path_of(store).read_bytes()
    # A record in one page is whole once its text is there; its page is padded with zeros.
    text_ends = [_text_end(whole, end) for end in ends]
    turn_ends = [text_ends[1], text_ends[2], text_ends[5]]
    for length in interesting_lengths(ends):
        path_of(store).write_bytes(whole[:length])
        if length < text_ends[0]:
            with pytest.raises(StoreCorruptError, match="first record is damaged"):
                store.open("s")
            continue
        with store.open("s") as file:
            num_turns = sum(length >= end for end in turn_ends)
            assert file.turns == turns[:num_turns]
            assert file.has_kv(1) == (length >= text_ends[3])
            assert (file.layout is not None) == (length >= text_ends[4])
            file.append_turn(make_turn(num_turns))
        with store.open("s") as file:
            assert file.turns == [*turns[:num_turns], make_turn(num_turns)]
            if file.has_kv(1):
                assert same_piece(file.read_kv(1), piece)


def _text_end(whole: bytes, end: int) -> int:
    """End of a record without the zeros that pad its page; no payload here ends with a zero."""
    return len(whole[:end].rstrip(b"\0"))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_never_gives_wrong_data(data: st.DataObject):
    with tempfile.TemporaryDirectory() as folder:
        store = SessionStore(Path(folder), IDENTITY)
        turns, piece, ends = write_sample(store)
        damaged = bytearray(path_of(store).read_bytes())
        start = data.draw(st.sampled_from([0, *ends[:-1]]))
        position = min(
            -(-start // PAGE_BYTES) * PAGE_BYTES + data.draw(st.integers(0, 6000)), len(damaged) - 1
        )
        damaged[position] ^= 1 << data.draw(st.integers(0, 7))
        path_of(store).write_bytes(damaged)

        file = open_or_refusal(store)
        if isinstance(file, str):
            assert file.startswith(str(path_of(store)))
            if "first record" in file:
                return
            mended = store.repair("s")
            assert mended is not None
            assert mended.kept.read_bytes() == damaged
            assert len(mended.lost_turns) <= mended.num_lost_records == 1
            turns = [turn for turn in turns if turn.index not in mended.lost_turns]
            turns = [dataclasses.replace(turn, index=index) for index, turn in enumerate(turns)]
            file = store.open("s")
            assert len(file.turns) == len(turns)
        with file:
            assert file.session == SESSION
            assert file.turns == turns[: len(file.turns)]
            assert len(file.turns) >= 2
            if file.turns[1].messages == make_turn(1, 4500).messages and file.has_kv(1):
                try:
                    assert same_piece(file.read_kv(1), piece)
                except KVUnavailableError:
                    assert not file.has_kv(1)


def test_damaged_kv_is_refused_and_can_be_written_again(store: SessionStore):
    _, piece, ends = write_sample(store)
    middle = page_after(ends[2]) + PAGE_BYTES + 100  # of the payload, behind the header's page
    with path_of(store).open("r+b") as raw:
        raw.seek(middle)
        byte = raw.read(1)[0]
        raw.seek(middle)
        raw.write(bytes([byte ^ 1]))
    with store.open("s") as file:
        assert file.has_kv(1)
        with pytest.raises(KVUnavailableError, match="wrong checksum"):
            file.read_kv(1)
        assert not file.has_kv(1)
        file.append_kv(1, piece)
        assert same_piece(file.read_kv(1), piece)
    with store.open("s") as file:
        assert same_piece(file.read_kv(1), piece)


def test_records_of_another_file_are_not_read(store: SessionStore, tmp_path: Path):
    """Two sessions with records at the same places: the tail of one is put on the head of the other."""
    turns, _, ends = write_sample(store)
    other = SessionStore(tmp_path / "other", IDENTITY)
    write_sample(other)
    end = -(-ends[1] // PAGE_BYTES) * PAGE_BYTES
    mixed = path_of(store).read_bytes()[:end] + path_of(other).read_bytes()[end:]
    path_of(store).write_bytes(mixed)
    with store.open("s") as file:
        assert file.turns == turns[:1]


def test_kv_that_imitates_a_record_is_only_kv(store: SessionStore, tmp_path: Path):
    """A torn KV piece that holds, at the right places, the headers of another session."""
    turns, _, ends = write_sample(store)
    other = SessionStore(tmp_path / "other", IDENTITY)
    write_sample(other)
    with other.open("s") as file:
        for index in range(3, 10):
            file.append_turn(make_turn(index))
    payload_start = (-(-ends[-1] // PAGE_BYTES) + 1) * PAGE_BYTES
    headers = path_of(other).read_bytes()[payload_start:]
    with store.open("s") as file:
        file.append_kv(0, KVPiece(KVFormat("raw", "float32", 1, 1, 2, 4), np.frombuffer(headers, np.uint8)))
    whole = path_of(store).read_bytes()
    path_of(store).write_bytes(whole[:-1])
    with store.open("s") as file:
        assert file.turns == turns
        assert not file.has_kv(0)


def test_a_session_deleted_while_it_is_opened_is_not_found(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
):
    write_sample(store)
    flock = fcntl.flock

    def delete_then_lock(*args: int) -> None:
        path_of(store).unlink()
        flock(*args)

    monkeypatch.setattr(fcntl, "flock", delete_then_lock)
    with pytest.raises(SessionNotFoundError):
        store.open("s")


def test_repair_of_a_sound_session_changes_nothing(store: SessionStore):
    write_sample(store)
    before = path_of(store).read_bytes()
    assert store.repair("s") is None
    assert path_of(store).read_bytes() == before


def test_kv_of_another_model_is_refused_and_its_own_can_be_added(store: SessionStore):
    turns, _, _ = write_sample(store)
    own = make_piece(5, "bfloat16", seed=9)
    other = SessionStore(store.root, OTHER_IDENTITY)
    with other.open("s") as file:
        with pytest.raises(KVUnavailableError, match="no KV of turn 1 for this model"):
            file.read_kv(1)
        assert file.turns == turns
        file.append_kv(1, own)
    with other.open("s") as file:
        assert same_piece(file.read_kv(1), own)
    with store.open("s") as file:
        assert file.read_kv(1).format.dtype == "float32"


def test_a_session_has_one_writer(store: SessionStore):
    with store.create(SESSION):
        for attempt in (store.open, store.delete, store.repair):
            with pytest.raises(SessionLockedError, match="open already"):
                attempt("s")
        script = (
            "import sys; from pathlib import Path\n"
            "from dayshift.engine.sessions.store import SessionStore\n"
            "SessionStore(Path(sys.argv[1]), bytes(range(32))).open('s')"
        )
        other = subprocess.run(
            [sys.executable, "-c", script, str(store.root)], capture_output=True, text=True, check=False
        )
        assert "SessionLockedError" in other.stderr
    store.open("s").close()


def test_a_killed_writer_loses_nothing_that_it_acknowledged(store: SessionStore, tmp_path: Path):
    script = (
        "import os, sys; from pathlib import Path\n"
        "from dayshift.engine.api import Message\n"
        "from dayshift.engine.sessions.records import SessionRecord, TurnRecord\n"
        "from dayshift.engine.sessions.store import SessionStore\n"
        "file = SessionStore(Path(sys.argv[1]), bytes(range(32))).create(SessionRecord(session_id='s',\n"
        "    system=None, system_token_ids=(), window=8, high_water=1.0, low_water=0.5, recall_budget=8))\n"
        "for index in range(10**9):\n"
        "    file.append_turn(TurnRecord(index=index, at=0.0, token_ids=(index,),\n"
        "        messages=(Message('user', 'x' * (index % 3 * 3000)),)))\n"
        "    os.write(1, b'%d\\n' % index)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", script, str(store.root)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    acknowledged = [int(writer.stdout.readline()) for _ in range(20)]
    writer.kill()
    acknowledged += [int(line) for line in writer.stdout.read().splitlines() if line]
    writer.wait()
    writer.stdout.close()
    with store.open("s") as file:
        assert len(acknowledged) <= len(file.turns) <= len(acknowledged) + 1
        assert [turn.token_ids for turn in file.turns] == [(i,) for i in range(len(file.turns))]


@pytest.mark.parametrize(("number", "error_type"), [(errno.ENOSPC, StoreFullError), (errno.EIO, StoreError)])
@pytest.mark.parametrize("failing_call", range(4))
def test_a_failed_write_or_sync_rolls_back(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch, number: int, error_type: type, failing_call: int
):
    """Each of the four calls that append a long turn fails once: payload, sync, header, sync."""
    turns, _, ends = write_sample(store)
    calls = 0

    def failing(call):
        def run(*args):
            nonlocal calls
            calls += 1
            if calls == failing_call + 1:
                raise OSError(number, os.strerror(number))
            return call(*args)

        return run

    with store.open("s") as file:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", failing(os.pwrite))
            patch.setattr(os, "fdatasync", failing(os.fdatasync))
            with pytest.raises(error_type, match=os.strerror(number)) as caught:
                file.append_turn(make_turn(3, 5000))
        assert calls == failing_call + 1
        assert "\n" not in str(caught.value)
        assert file.turns == turns
        assert path_of(store).stat().st_size <= -(-ends[-1] // PAGE_BYTES) * PAGE_BYTES
        file.append_turn(make_turn(3))
    with store.open("s") as file:
        assert file.turns == [*turns, make_turn(3)]


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_write_that_ends_in_the_middle_rolls_back(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch, is_direct: bool
):
    """A disk that fills up takes a part of a piece of KV first."""
    turns, piece, ends = write_sample(store)
    store.is_direct &= is_direct
    num_calls = 0
    pwrite = os.pwrite

    def fill_up(fd: int, data: memoryview, offset: int) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            return pwrite(fd, data[:PAGE_BYTES], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with store.open("s") as file:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fill_up)
            with pytest.raises(StoreFullError):
                file.append_kv(0, piece)
        assert num_calls == 2
        assert path_of(store).stat().st_size <= page_after(ends[-1])
        file.append_kv(0, piece)
        assert same_piece(file.read_kv(0), piece)
        assert file.turns == turns


def test_after_a_failure_that_cannot_be_undone_nothing_is_appended(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
):
    turns, _, _ = write_sample(store)

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with store.open("s") as file:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            patch.setattr(os, "ftruncate", fail)
            with pytest.raises(StoreError):
                file.append_turn(make_turn(3))
        with pytest.raises(StoreError, match="open the session again"):
            file.append_turn(make_turn(3))
        assert file.turns == turns
    with store.open("s") as file:
        assert file.turns[:3] == turns


def test_a_full_disk_at_creation_leaves_nothing_behind(store: SessionStore):
    with file_size_limit(100), pytest.raises(StoreFullError):
        store.create(SESSION)
    assert list(store.root.iterdir()) == []
    store.create(SESSION).close()


def test_a_session_that_begins_long_is_synced_once(store: SessionStore, monkeypatch: pytest.MonkeyPatch):
    synced: list[int] = []
    fdatasync = os.fdatasync

    def counted(fd: int) -> None:
        size = os.fstat(fd).st_size
        synced.extend([size] if size > PAGE_BYTES else [])  # not the lease
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", counted)
    turns = [make_turn(index, 5000) for index in range(20)]
    limits = {"window": 64, "high_water": 1.0, "low_water": 0.5, "recall_budget": 0}
    session = SessionRecord(session_id="long", system=None, system_token_ids=(), **limits)
    store.create(session, turns).close()
    assert synced == [path_of(store, "long").stat().st_size]
    with store.open("long") as file:
        assert file.turns == turns
        file.append_turn(make_turn(20))
    assert len(synced) > 1


def test_create_list_delete(store: SessionStore):
    ids = ["robot-1", "../../etc/passwd", ".", "a/b%2F", "機械", "x" * 200]
    for session_id in ids:
        session = SessionRecord(
            session_id=session_id,
            system=None,
            system_token_ids=(),
            window=1,
            high_water=1.0,
            low_water=1.0,
            recall_budget=0,
        )
        store.create(session).close()
    assert store.list_session_ids() == sorted(ids)
    assert len(list(store.root.glob("*.session"))) == len(ids)
    for session_id in ids:
        with store.open(session_id) as file:
            assert file.session.session_id == session_id
    store.delete("機械")
    with pytest.raises(SessionNotFoundError, match="no session '機械'"):
        store.open("機械")
    with pytest.raises(SessionNotFoundError):
        store.delete("機械")
    assert "機械" not in store.list_session_ids()


def test_a_taken_id_is_refused_and_its_session_untouched(store: SessionStore):
    turns, _, _ = write_sample(store)
    with pytest.raises(SessionExistsError, match="'s' exists already"):
        store.create(SESSION)
    with store.open("s") as file:
        assert file.turns == turns
    assert sorted(path.name for path in store.root.iterdir()) == ["s.lease", "s.session"]


@pytest.mark.parametrize("session_id", ["", "x" * 201, "機" * 30, "\ud800"])
def test_ids_that_cannot_name_a_file_are_refused(store: SessionStore, session_id: str):
    with pytest.raises(InvalidRequestError, match="session id"):
        store.open(session_id)


def test_a_file_of_something_else_is_refused(store: SessionStore):
    path_of(store).write_bytes(os.urandom(3 * PAGE_BYTES))
    with pytest.raises(StoreCorruptError, match="not a session file"):
        store.open("s")
    with pytest.raises(StoreCorruptError, match="not a session file"):
        store.repair("s")
    store.delete("s")
    assert store.list_session_ids() == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="Not a directory"):
        SessionStore(tmp_path / "file" / "sessions", IDENTITY)


def test_what_would_not_read_back_is_not_written(store: SessionStore):
    file: SessionFile
    with store.create(SESSION) as file:
        endless = TurnRecord(index=0, at=float("inf"), messages=(), token_ids=())
        with pytest.raises(ValueError, match="float"):
            file.append_turn(endless)
        with pytest.raises(ValueError, match="appended after 0 turns"):
            file.append_turn(make_turn(1))
    with store.open("s") as file:
        assert file.turns == []
