"""The session store: a folder with one append-only, checksummed file per session. No torch here."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote

from dayshift.engine.api import (
    InvalidRequestError,
    SessionExistsError,
    SessionLockedError,
    SessionNotFoundError,
)
from dayshift.engine.sessions import record_format
from dayshift.engine.sessions.copying import copy_session
from dayshift.engine.sessions.inspect import inspect_session
from dayshift.engine.sessions.lease import Lease, LeaseFile
from dayshift.engine.sessions.leftovers import UNNAMED_SUFFIX, remove_leftovers
from dayshift.engine.sessions.payload_io import PayloadIO, can_direct
from dayshift.engine.sessions.record_format import Record, RecordKind
from dayshift.engine.sessions.records import SessionRecord, TurnRecord
from dayshift.engine.sessions.salvage import Repair, salvaged
from dayshift.engine.sessions.session_file import (
    OpenedFile,
    SessionFile,
    StoreCorruptError,
    StoreCounters,
    StoreFullError,
    decoded,
    first_record,
    store_errors,
)

SUFFIX = ".session"
NO_IDENTITY = bytes(record_format.IDENTITY_BYTES)  # of tools, which belong to no model
_LEASE_SUFFIX = ".lease"
_MAX_NAME_BYTES = 200
_NUM_LOCK_TRIES, _LOCK_WAIT_S = 50, 0.001


class SessionStore:
    """The session files of a folder, one writer each.

    Args:
        root: the folder, made if it is missing.
        identity: SHA-256 of all that decides whether stored KV and token ids may be used again:
            weights, dtype, layout, rotary parameters, tokenizer, template.
        quota_bytes: KV is written only while all files together stay below; the KV of closed
            sessions makes room, the one first that was written to longest ago. Text is always taken.
        read_deadline_s: longest wait for a KV piece; then it is computed again.
        is_direct: whether KV passes the page cache by; None: where the file system can, which is found out
            by writing, so that a folder that cannot be written to is refused now.

    Attributes:
        is_direct: KV passes the page cache by (O_DIRECT); not every file system can.
    """

    def __init__(
        self,
        root: Path,
        identity: bytes = NO_IDENTITY,
        *,
        quota_bytes: int | None = None,
        read_deadline_s: float = 30.0,
        is_direct: bool | None = None,
    ) -> None:
        if len(identity) != record_format.IDENTITY_BYTES:
            raise ValueError(f"identity has {len(identity)} bytes, not {record_format.IDENTITY_BYTES}")
        self.root = root
        self.identity = identity
        self.counters = StoreCounters()
        self._quota_bytes = quota_bytes
        self._read_deadline_s = read_deadline_s
        # A thread that writes KV drops that of closed sessions for it: these may be opened meanwhile.
        self._changing = threading.Lock()
        with store_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            self.is_direct = can_direct(root) if is_direct is None else is_direct
            if is_direct is None:
                remove_leftovers(root)

    # --- one session ---------------------------------------------------------------------------

    def create(self, session: SessionRecord, turns: Iterable[TurnRecord] = ()) -> SessionFile:
        """A new session's file, with the turns that it begins with; durable when this returns.

        Raises:
            SessionExistsError: the id is taken.
            InvalidRequestError: the id cannot name a file.
            StoreError: it cannot be written.
        """
        path = self.path(session.session_id)
        with store_errors(path), self._new_name(path, session.session_id) as lease:
            with self._new_file(path) as (file, unnamed):
                with _closed_on_error(self._opened(file, path, lease)) as opened:
                    created = SessionFile.create(opened, identity=self.identity, session=session, turns=turns)
                # Only a whole file gets its name: a crash never leaves one without a first record.
                os.rename(unnamed, path)
            sync_folder(self.root)
        return created

    def open(self, session_id: str) -> SessionFile:
        """An existing session, cut to its last whole record if its last append was torn.

        Raises:
            SessionNotFoundError: no session has this id.
            SessionLockedError: it is open already, here or in another engine.
            StoreCorruptError: a record is damaged and more follow; see `repair`.
            StoreError: it cannot be read.
        """
        with self._changing:
            return self._open(session_id)

    def _open(self, session_id: str) -> SessionFile:
        file, path = self._open_locked(session_id)
        try:
            with store_errors(path), self._lease_file(path).locked():
                if not _is_at(file, path):
                    raise SessionLockedError("the session is being taken over", path)
                lease = self._lease_file(path).raise_epoch(_last_epoch(file))
                with _closed_on_error(self._opened(file, path, lease)) as opened:
                    return SessionFile.load(opened, identity=self.identity)
        except BaseException:
            file.close()
            raise

    def peek(self, session_id: str) -> SessionFile:
        """A session as it stands on disk, for reading only, whoever has it open. To be closed.

        Raises SessionNotFoundError, StoreCorruptError, StoreError as `open`.
        """
        path = self.path(session_id)
        with store_errors(path):
            file = self._open_to_read(session_id)
            with _closed_on_error(self._opened(file, path, None)) as opened:
                return SessionFile.read(opened, identity=self.identity)

    def delete(self, session_id: str) -> None:
        """Remove a closed session for good. Raises as `open`, though damage is no obstacle."""
        with self._changing:
            file, path = self._open_locked(session_id)
            with file, store_errors(path), self._lease_file(path).locked():
                path.unlink()
                self._lease_file(path).path.unlink(missing_ok=True)
                sync_folder(self.root)

    def repair(self, session_id: str) -> Repair | None:
        """Put what is whole of a damaged session in its place, because a user asked for it; see `salvaged`.

        Returns:
            What was lost, and where the damaged file is kept; None if nothing but a torn end was damaged.

        Raises:
            As `open`; StoreCorruptError if not even the first record is whole.
        """
        with self._changing:
            file, path = self._open_locked(session_id)
            with file, store_errors(path), self._lease_file(path).locked():
                if not inspect_session(path, checks_kv=True).problems:
                    return None
                records = list(record_format.scan_past_damage(file.fileno()))
                kept_records, lost_turns = salvaged(records)
                kept = self._kept_aside(path)
                lease = self._lease_file(path).raise_epoch(max(r.header.epoch for r in records))
                try:
                    self._replace(path, file, lease, with_kv=True, records=kept_records)
                except BaseException:
                    if kept.samefile(path):  # not replaced: what stands there needs no second name
                        kept.unlink()
                    raise
        return Repair(
            kept=kept,
            num_turns=sum(record.header.kind is RecordKind.TURN for record in records),
            lost_turns=lost_turns,
            num_lost_records=records[-1].header.sequence + 1 - len(records),
        )

    def _kept_aside(self, path: Path) -> Path:
        """A second name for a file that is to be replaced."""
        number = 1
        while (kept := path.with_name(f"{path.name}.damaged-{number}")).exists():
            number += 1
        os.link(path, kept)
        return kept

    def take_over(self, session_id: str) -> None:
        """Take a session from an engine that hangs with it: whoever opens it next is its writer.

        The file is copied, so that a late write of the old writer goes nowhere; the old writer is
        refused at its next append. Raises SessionNotFoundError, SessionLockedError, StoreError.
        """
        path = self.path(session_id)
        with store_errors(path), self._lease_file(path).locked(), self._open_to_read(session_id) as source:
            # First the epoch, then the copy: what the old writer still acknowledges is in the copy.
            lease = self._lease_file(path).raise_epoch(_last_epoch(source))
            self._replace(path, source, lease, with_kv=True)

    # --- files outside the store ---------------------------------------------------------------

    def export(self, session_id: str, to: Path, *, with_kv: bool) -> None:
        """Write a session, also one that is open, as one file that any store can import.

        Raises SessionNotFoundError, StoreCorruptError, StoreError (also if `to` exists).
        """
        path = self.path(session_id)
        with store_errors(to), self._open_to_read(session_id) as source:
            file_bytes = os.fstat(source.fileno()).st_size
            records = list(record_format.scan(source.fileno(), file_bytes))
            first, end = first_record(iter(records), path).header, records[-1].header.next_offset
            if record_format.has_record_after(source.fileno(), end, first.nonce, file_bytes):
                raise StoreCorruptError(f"damaged at byte {end}, and more follows; repair it first", path)
            with io.FileIO(to, "x+b") as target:
                try:
                    copy_session(source, target, None, with_kv=with_kv, records=records)
                except BaseException:
                    to.unlink()
                    raise

    def import_file(self, source_path: Path, session_id: str | None = None) -> str:
        """Take an exported file into the store, under its own id or another one; returns the id.

        Raises StoreCorruptError: not a session's file, or damaged; SessionExistsError, StoreError.
        """
        with store_errors(source_path), io.FileIO(source_path, "rb") as source:
            records = list(record_format.scan(source.fileno()))
            first = first_record(iter(records), source_path)
            end = records[-1].header.next_offset
            if os.fstat(source.fileno()).st_size > end:
                raise StoreCorruptError(f"damaged at byte {end}", source_path)
            return self._import(source, decoded(first, SessionRecord, source_path), session_id)

    # --- the folder ----------------------------------------------------------------------------

    def list_session_ids(self) -> list[str]:
        """Ids of all sessions in the folder, sorted."""
        return sorted(unquote(path.name.removesuffix(SUFFIX)) for path in self._session_paths())

    @property
    def num_bytes(self) -> int:
        """Bytes that all session files take."""
        return sum(size for _, size, _ in self._files())

    def path(self, session_id: str) -> Path:
        """The file of a session, whether it is there or not. Raises InvalidRequestError."""
        try:
            name = quote(session_id, safe="")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"session id {session_id!r} is not valid Unicode") from error
        if not 0 < len(name) <= _MAX_NAME_BYTES:
            raise InvalidRequestError(
                f"session id {session_id[:20]!r} makes a file name of {len(name)} bytes; "
                f"allowed are 1 to {_MAX_NAME_BYTES}"
            )
        return self.root / f"{name}{SUFFIX}"

    def _files(self) -> list[tuple[float, int, Path]]:
        """Time of the last write, size and path of every session file, oldest first."""
        found = []
        for path in self._session_paths():
            with contextlib.suppress(FileNotFoundError):  # another engine may delete it now
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        return sorted(found)

    def _session_paths(self) -> Iterator[Path]:
        """Files that have a session's name; somebody may have put others and folders beside them."""
        with os.scandir(self.root) as entries:
            yield from (self.root / e.name for e in entries if _is_session_name(e.name) and e.is_file())

    def _make_room(self, num_bytes: int) -> None:
        """Drop the KV of closed sessions until `num_bytes` more fit. Raises StoreFullError."""
        if self._quota_bytes is not None:
            with self._changing:
                self._drop_kv_for(num_bytes, self._quota_bytes)

    def _drop_kv_for(self, num_bytes: int, quota_bytes: int) -> None:
        files = self._files()
        used = sum(size for _, size, _ in files)
        for _, size, path in files:
            if used + num_bytes <= quota_bytes:
                return
            used -= size - self._drop_kv(path)
        if used + num_bytes > quota_bytes:
            raise StoreFullError(
                f"{num_bytes} bytes of KV do not fit into the quota of {quota_bytes} "
                f"bytes; {used} are taken by text and by open sessions",
                self.root,
            )

    def _drop_kv(self, path: Path) -> int:
        """Rewrite a closed session without its KV; its size then. An open one stays as it is."""
        try:
            file, _ = self._open_locked(unquote(path.name.removesuffix(SUFFIX)))
        except (SessionLockedError, SessionNotFoundError):
            return path.stat().st_size if path.exists() else 0
        with file:
            size = os.fstat(file.fileno()).st_size
            if all(r.header.kind is not RecordKind.KV for r in record_format.scan(file.fileno())):
                return size
            try:
                with self._lease_file(path).locked():
                    lease = self._lease_file(path).raise_epoch(_last_epoch(file))
                    self._replace(path, file, lease, with_kv=False)
            except SessionLockedError:
                return size
        self.counters.num_evicted_sessions += 1
        return path.stat().st_size

    # --- parts ---------------------------------------------------------------------------------

    def _import(self, source: io.FileIO, session: SessionRecord, session_id: str | None) -> str:
        session_id = session.session_id if session_id is None else session_id
        with self._new_name(self.path(session_id), session_id) as lease:
            self._replace(self.path(session_id), source, lease, with_kv=True, session_id=session_id)
        return session_id

    @contextmanager
    def _new_name(self, path: Path, session_id: str) -> Iterator[Lease]:
        """The lease of a session that is made meanwhile; it is gone if that fails."""
        lease_file = self._lease_file(path)
        with lease_file.locked():
            if path.exists():
                raise SessionExistsError(f"session {session_id!r} exists already")
            try:
                yield lease_file.raise_epoch(0)
            except BaseException:
                lease_file.path.unlink(missing_ok=True)
                raise

    def _replace(
        self,
        path: Path,
        source: io.FileIO,
        lease: Lease,
        *,
        with_kv: bool,
        session_id: str | None = None,
        records: Iterable[Record] | None = None,
    ) -> None:
        """Put a copy of `source` in the place of `path`, durably and at once."""
        with self._new_file(path) as (target, unnamed):
            copy_session(source, target, lease, with_kv=with_kv, session_id=session_id, records=records)
            if path.exists():
                shutil.copystat(path, unnamed)  # a rewritten session is not a younger one
            os.rename(unnamed, path)
            sync_folder(self.root)
            target.close()

    @contextmanager
    def _new_file(self, path: Path) -> Iterator[tuple[io.FileIO, Path]]:
        """An empty, locked file that is to be renamed to `path`; gone if it was not, or on an error."""
        fd, name = tempfile.mkstemp(dir=self.root, prefix=f"{path.name}.", suffix=UNNAMED_SUFFIX)
        file, unnamed = io.FileIO(fd, "r+b"), Path(name)
        try:
            _lock(file, path)
            yield file, unnamed
        except BaseException:
            file.close()
            unnamed.unlink(missing_ok=True)
            raise

    def _open_to_read(self, session_id: str) -> io.FileIO:
        try:
            return io.FileIO(self.path(session_id), "rb")
        except FileNotFoundError as error:
            raise self._not_found(session_id) from error

    def _open_locked(self, session_id: str) -> tuple[io.FileIO, Path]:
        path = self.path(session_id)
        with store_errors(path):
            while True:
                try:
                    file = io.FileIO(path, "r+b")
                except FileNotFoundError as error:
                    raise self._not_found(session_id) from error
                try:
                    _lock(file, path)
                    if _is_at(file, path):
                        return file, path
                except BaseException:
                    file.close()
                    raise
                file.close()  # deleted or replaced between opening and locking: look again

    def _opened(self, file: io.FileIO, path: Path, lease: Lease | None) -> OpenedFile:
        payloads = PayloadIO(file, is_direct=self.is_direct, deadline_s=self._read_deadline_s)
        return OpenedFile(file, path, payloads, lease, self._make_room, self.counters)

    def _lease_file(self, path: Path) -> LeaseFile:
        return LeaseFile(path.with_suffix(_LEASE_SUFFIX))

    def _not_found(self, session_id: str) -> SessionNotFoundError:
        return SessionNotFoundError(f"no session {session_id!r} in {self.root}")


@contextmanager
def _closed_on_error(opened: OpenedFile) -> Iterator[OpenedFile]:
    try:
        yield opened
    except BaseException:
        opened.close()
        raise


def _is_session_name(name: str) -> bool:
    """Whether `SessionStore.path` gives a file this name."""
    stem = name.removesuffix(SUFFIX)
    return stem != name and 0 < len(stem) <= _MAX_NAME_BYTES and quote(unquote(stem), safe="") == stem


def sync_folder(folder: Path) -> None:
    """Make a new or removed name in the folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lock(file: io.FileIO, path: Path) -> None:
    for _ in range(_NUM_LOCK_TRIES):
        if _try_lock(file, fcntl.LOCK_EX):
            return
        if not _try_lock(file, fcntl.LOCK_SH):
            break
        # Nobody writes: somebody asks just now whether anybody does (`inspect`), and lets go at once.
        fcntl.flock(file.fileno(), fcntl.LOCK_UN)
        time.sleep(_LOCK_WAIT_S)
    raise SessionLockedError("the session is open already, here or in another engine", path)


def _try_lock(file: io.FileIO, kind: int) -> bool:
    try:
        fcntl.flock(file.fileno(), kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: io.FileIO, path: Path) -> bool:
    """Whether the open file is still the one with this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _last_epoch(file: io.FileIO) -> int:
    return max((record.header.epoch for record in record_format.scan(file.fileno())), default=0)
