"""A damaged session is mended; a store is looked into: live, full, with files of others in it."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dayshift.engine.api import OnMatch
from dayshift.engine.sessions import record_format
from dayshift.engine.sessions import store as store_module
from dayshift.engine.sessions.inspect import inspect_session
from dayshift.engine.sessions.record_format import PAGE_BYTES, RecordKind
from dayshift.engine.sessions.records import LayoutRecord
from dayshift.engine.sessions.session_file import StoreCorruptError, StoreError, StoreFullError
from dayshift.engine.sessions.store import SessionStore
from tests.engine.store.samples import (
    IDENTITY,
    SESSION,
    file_size_limit,
    make_piece,
    make_turn,
    page_after,
    path_of,
    same_piece,
    write_sample,
)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_repair_keeps_what_stands_behind_the_damage(store: SessionStore):
    """Turn 1 of six is lost: the turns, KV and layout behind it are kept, and numbered anew."""
    _, _, ends = write_sample(store)
    pieces = {2: make_piece(3, seed=2), 4: make_piece(2, seed=4)}
    with store.open("s") as file:
        for index in range(3, 6):
            file.append_turn(make_turn(index))
        for turn, piece in pieces.items():
            file.append_kv(turn, piece)
        triggers = (OnMatch(text="x", last_n=1),)
        layout = {"num_turns": 5, "window_turns": (2, 3, 4), "recalled_turns": (0, 1), "triggers": triggers}
        file.append_layout(LayoutRecord(**layout))
    flip(path_of(store), page_after(ends[1]) + 9)
    with pytest.raises(StoreCorruptError, match="after 1 turns; more follows"):
        store.open("s")
    mended = store.repair("s")
    assert mended is not None
    assert (mended.lost_turns, mended.num_turns, mended.num_lost_records) == ((1,), 5, 1)
    with store.open("s") as file:
        assert [turn.messages for turn in file.turns] == [make_turn(i).messages for i in (0, 2, 3, 4, 5)]
        assert [turn.index for turn in file.turns] == list(range(5))
        assert file.layout == LayoutRecord(
            num_turns=4, window_turns=(1, 2, 3), recalled_turns=(0,), triggers=triggers
        )
        assert [turn for turn in range(5) if file.has_kv(turn)] == [1, 3]
        assert same_piece(file.read_kv(1), pieces[2])
        assert same_piece(file.read_kv(3), pieces[4])
        file.append_turn(make_turn(5))
    assert inspect_session(path_of(store), checks_kv=True).problems == ()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_repair_that_fails_loses_no_byte(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
):
    """It fails before the mended copy has the session's name, or behind that, when the folder is synced."""
    _, _, ends = write_sample(store)
    path = path_of(store)
    flip(path, page_after(ends[1]) + 9)
    damaged = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    with monkeypatch.context() as patched:
        if is_replaced:
            patched.setattr(store_module, "sync_folder", fail)
        else:
            patched.setattr(store_module.os, "rename", fail)
        with pytest.raises(StoreError, match="broken"):
            store.repair("s")
    kept = sorted(path.parent.glob(f"{path.name}.damaged-*"))
    assert [file.read_bytes() for file in kept] == ([damaged] if is_replaced else [])
    assert (path.read_bytes() == damaged) is not is_replaced


def test_repair_leaves_damaged_kv_out(store: SessionStore):
    turns, _, ends = write_sample(store)
    flip(path_of(store), page_after(ends[2]) + PAGE_BYTES + 100)
    mended = store.repair("s")
    assert mended is not None
    assert (mended.lost_turns, mended.num_lost_records) == ((), 0)
    with store.open("s") as file:
        assert file.turns == turns
        assert not file.has_kv(1)
    assert store.repair("s") is None


def test_a_repair_that_fails_changes_nothing(store: SessionStore):
    _, _, ends = write_sample(store)
    flip(path_of(store), page_after(ends[1]) + 9)
    before = {path.name: path.read_bytes() for path in store.root.glob("*.session*")}
    with file_size_limit(PAGE_BYTES), pytest.raises(StoreFullError):
        store.repair("s")
    assert {path.name: path.read_bytes() for path in store.root.glob("*.session*")} == before


def test_a_damaged_session_is_not_exported_in_part(store: SessionStore, tmp_path: Path):
    _, _, ends = write_sample(store)
    flip(path_of(store), page_after(ends[1]) + 9)
    with pytest.raises(StoreCorruptError, match=f"damaged at byte {page_after(ends[1])}"):
        store.export("s", tmp_path / "s.export", with_kv=True)
    assert not (tmp_path / "s.export").exists()


def test_what_is_appended_while_one_looks_is_no_damage(store: SessionStore, monkeypatch: pytest.MonkeyPatch):
    turns, _, _ = write_sample(store)
    with store.open("s") as file:
        scan = record_format.scan

        def scan_and_append(*args: int) -> Iterator[record_format.Record]:
            yield from scan(*args)
            for _ in range(2):
                file.append_turn(make_turn(len(file.turns)))

        with monkeypatch.context() as patch:
            patch.setattr(record_format, "scan", scan_and_append)
            report = inspect_session(path_of(store))
        assert report.problems == ()
        assert list(report.turns) == turns
        assert len(file.turns) == len(turns) + 2


def test_somebody_who_looks_does_not_keep_a_session_from_being_opened(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
):
    write_sample(store)
    with path_of(store).open("rb") as reader:
        fcntl.flock(reader.fileno(), fcntl.LOCK_SH)  # as `inspect_session` does, for a moment
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(reader.fileno(), fcntl.LOCK_UN))
        store.open("s").close()


def test_a_text_record_that_says_nothing_is_refused(store: SessionStore):
    """Its checksums fit: somebody else's program wrote it."""
    with store.create(SESSION) as file:
        file._append(RecordKind.LAYOUT, memoryview(b'{"turns": "all"}'), turn_index=-1)
    for attempt in (lambda: store.open("s"), lambda: inspect_session(path_of(store))):
        with pytest.raises(StoreCorruptError, match="is no LayoutRecord"):
            attempt()


def test_a_full_disk_is_no_obstacle_to_reading(store: SessionStore):
    turns, _, _ = write_sample(store)
    with file_size_limit(16):  # the lease's bytes can be written over, and no others
        full = SessionStore(store.root, IDENTITY)
        with full.open("s") as file:
            assert file.turns == turns
            assert file.has_kv(1)
            with pytest.raises(StoreFullError):
                file.append_turn(make_turn(3))
        full.delete("s")
    assert list(store.root.iterdir()) == []


def test_what_a_killed_engine_left_is_removed_and_nothing_else(store: SessionStore):
    """Old and held by nobody: a copy, a measurement, a probe. Young, held, or named otherwise: kept."""
    write_sample(store)
    old = ("s.session.a1.new", ".direct-1-2", ".measurement-x")
    kept = ("s.session.a2.new", "notes.new", "s.session.held.new")
    for name in (*old[:2], *kept):
        (store.root / name).touch()
    (store.root / old[2]).mkdir()
    (store.root / old[2] / "measurement.session").touch()
    for name in (*old, *kept[1:]):
        os.utime(store.root / name, (0, 0))
    with (store.root / kept[2]).open("rb") as held:
        fcntl.flock(held.fileno(), fcntl.LOCK_EX)
        SessionStore(store.root, IDENTITY)
    assert sorted(p.name for p in store.root.iterdir()) == sorted((*kept, "s.lease", "s.session"))


def test_files_of_others_are_not_sessions(store: SessionStore):
    write_sample(store)
    for name in (".session", "%FF.session", "two words.session", "a%2fb.session", "x" * 201 + ".session"):
        (store.root / name).touch()
    (store.root / "folder.session").mkdir()
    (store.root / "gone.session").symlink_to("nowhere")
    os.mkfifo(store.root / "pipe.session")
    assert store.list_session_ids() == ["s"]
    assert store.num_bytes == path_of(store).stat().st_size
