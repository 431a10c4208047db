"""The session store: a folder with one append-only, checksummed file per session. No torch here."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import tempfile
from pathlib import Path
from urllib.parse import quote, unquote

from dayshift.engine.api import (
    InvalidRequestError,
    SessionExistsError,
    SessionLockedError,
    SessionNotFoundError,
)
from dayshift.engine.sessions import record_format
from dayshift.engine.sessions.records import SessionRecord
from dayshift.engine.sessions.session_file import (
    SessionFile,
    StoreCorruptError,
    store_errors,
)

_SUFFIX = ".session"
_MAX_NAME_BYTES = 200


class SessionStore:
    """The session files of a folder, one writer each.

    Args:
        root: the folder, made if it is missing.
        identity: SHA-256 of all that decides whether stored KV and token ids may be used again:
            weights, dtype, layout, rotary parameters, tokenizer, template.
    """

    def __init__(self, root: Path, identity: bytes) -> None:
        if len(identity) != record_format.IDENTITY_BYTES:
            raise ValueError(f"identity has {len(identity)} bytes, not {record_format.IDENTITY_BYTES}")
        self.root = root
        self.identity = identity
        with store_errors(root):
            root.mkdir(parents=True, exist_ok=True)

    def list_session_ids(self) -> list[str]:
        """Ids of all sessions in the folder, sorted."""
        return sorted(unquote(path.name.removesuffix(_SUFFIX)) for path in self.root.glob(f"*{_SUFFIX}"))

    def create(self, session: SessionRecord) -> SessionFile:
        """A new session's file, durable when this returns.

        Raises:
            SessionExistsError: the id is taken.
            InvalidRequestError: the id cannot name a file.
            StoreError: it cannot be written.
        """
        path = self._path(session.session_id)
        with store_errors(path):
            fd, unnamed = tempfile.mkstemp(dir=self.root, prefix=f"{path.name}.", suffix=".new")
            file = io.FileIO(fd, "r+b")
            try:
                _lock(file, path)
                created = SessionFile.create(file, path, identity=self.identity, session=session)
                # Only a whole file gets its name: a crash never leaves one without a first record.
                os.link(unnamed, path)
                _sync_folder(self.root)
            except BaseException as error:
                file.close()
                if isinstance(error, FileExistsError):
                    raise SessionExistsError(f"session {session.session_id!r} exists already") from error
                raise
            finally:
                os.unlink(unnamed)
        return created

    def open(self, session_id: str) -> SessionFile:
        """An existing session, cut to its last whole record if its last append was torn.

        Raises:
            SessionNotFoundError: no session has this id.
            SessionLockedError: it is open already, here or in another engine.
            StoreCorruptError: a record is damaged and more follow; see `repair`.
            StoreError: it cannot be read.
        """
        file, path = self._open_locked(session_id)
        try:
            with store_errors(path):
                return SessionFile.load(file, path, identity=self.identity)
        except BaseException:
            file.close()
            raise

    def peek(self, session_id: str) -> SessionFile:
        """A session as it stands on disk, for reading only, whoever has it open. To be closed.

        Raises SessionNotFoundError, StoreCorruptError, StoreError as `open`.
        """
        path = self._path(session_id)
        with store_errors(path):
            try:
                file = io.FileIO(path, "rb")
            except FileNotFoundError as error:
                raise self._not_found(session_id) from error
            try:
                return SessionFile.read(file, path, identity=self.identity)
            except BaseException:
                file.close()
                raise

    def repair(self, session_id: str) -> Path | None:
        """Cut a damaged session before its first damaged record, because a user asked for it.

        Returns:
            The copy of the damaged file, kept beside it; None if nothing but a torn end was damaged.

        Raises:
            As `open`; StoreCorruptError if not even the first record is whole.
        """
        file, path = self._open_locked(session_id)
        with file, store_errors(path):
            headers = [record.header for record in record_format.scan(file.fileno())]
            if not headers:
                raise StoreCorruptError(f"{path}: the first record is damaged; nothing can be repaired")
            end = headers[-1].next_offset
            if not record_format.has_record_after(file.fileno(), end, headers[0].nonce):
                return None
            number = 1
            while (kept := path.with_name(f"{path.name}.damaged-{number}")).exists():
                number += 1
            shutil.copyfile(path, kept)
            file.truncate(end)
            os.fsync(file.fileno())
            return kept

    def delete(self, session_id: str) -> None:
        """Remove a closed session for good. Raises as `open`, though damage is no obstacle."""
        file, path = self._open_locked(session_id)
        with file, store_errors(path):
            path.unlink()
            _sync_folder(self.root)

    def _open_locked(self, session_id: str) -> tuple[io.FileIO, Path]:
        path = self._path(session_id)
        with store_errors(path):
            try:
                file = io.FileIO(path, "r+b")
            except FileNotFoundError as error:
                raise self._not_found(session_id) from error
            try:
                _lock(file, path)
                if os.fstat(file.fileno()).st_nlink == 0:  # deleted between opening and locking
                    raise self._not_found(session_id)
            except BaseException:
                file.close()
                raise
        return file, path

    def _not_found(self, session_id: str) -> SessionNotFoundError:
        return SessionNotFoundError(f"no session {session_id!r} in {self.root}")

    def _path(self, session_id: str) -> Path:
        try:
            name = quote(session_id, safe="")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"session id {session_id!r} is not valid Unicode") from error
        if not 0 < len(name) <= _MAX_NAME_BYTES:
            raise InvalidRequestError(
                f"session id {session_id[:20]!r} makes a file name of {len(name)} bytes; "
                f"allowed are 1 to {_MAX_NAME_BYTES}"
            )
        return self.root / f"{name}{_SUFFIX}"


def _lock(file: io.FileIO, path: Path) -> None:
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SessionLockedError(f"{path}: the session is open already, here or in another engine") from error


def _sync_folder(folder: Path) -> None:
    """Make a new or removed name in the folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
