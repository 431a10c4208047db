"""What a session's file holds, read from the file alone: no model, no lock, and nothing is changed."""

from __future__ import annotations

import fcntl
import io
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from crc32c import crc32c

from dayshift.engine.sessions import record_format
from dayshift.engine.sessions.record_format import Record, RecordHeader, RecordKind
from dayshift.engine.sessions.records import SYSTEM, LayoutRecord, SessionRecord, TurnRecord
from dayshift.engine.sessions.session_file import StoreError, decoded, first_record, store_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKV:
    """KV pieces of one codec and dtype that still count (later pieces of a turn replace earlier ones)."""

    codec: str
    dtype: str
    num_pieces: int
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReport:
    """A session file. `problems` are damages, one line each; a torn end is none."""

    session: SessionRecord
    turns: tuple[TurnRecord, ...]
    layout: LayoutRecord | None
    kv: tuple[StoredKV, ...]
    num_models: int  # identities that wrote to it
    num_bytes: int
    num_torn_bytes: int  # of an append that was never acknowledged, cut off at the next opening
    epoch: int  # of the last record
    modified_at: float  # Unix time
    is_open: bool  # an engine holds it
    problems: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the system prompt and all turns."""
        return len(self.session.system_token_ids) + sum(len(turn.token_ids) for turn in self.turns)


def inspect_session(path: Path, *, checks_kv: bool = False) -> SessionReport:
    """Read a session's file; with `checks_kv` also the checksums of its KV.

    Raises StoreCorruptError if not even the first record is whole, StoreError.
    """
    with store_errors(path), io.FileIO(path, "rb") as file:
        status = os.fstat(file.fileno())
        records = list(record_format.scan(file.fileno(), status.st_size))
        first = first_record(iter(records), path)
        end = records[-1].header.next_offset
        problems = []
        if record_format.has_record_after(file.fileno(), end, first.header.nonce, status.st_size):
            problems.append(f"damaged at byte {end}, and more follows; see `dayshift sessions repair`")
        kept, layouts = _kept_kv(records), _of(records, RecordKind.LAYOUT)
        if checks_kv:
            problems += [problem for header in kept if (problem := _kv_problem(file, header))]
        return SessionReport(
            session=decoded(first, SessionRecord, path),
            turns=tuple(decoded(r, TurnRecord, path) for r in _of(records, RecordKind.TURN)),
            layout=decoded(layouts[-1], LayoutRecord, path) if layouts else None,
            kv=_by_codec(kept),
            num_models=len({record.header.identity for record in records}),
            num_bytes=status.st_size,
            num_torn_bytes=0 if problems else max(0, status.st_size - end),
            epoch=records[-1].header.epoch,
            modified_at=status.st_mtime,
            is_open=_is_locked(file),
            problems=tuple(problems),
        )


def try_inspect(path: Path, *, checks_kv: bool = False) -> SessionReport | StoreError:
    """`inspect_session`, or why the file cannot be read at all."""
    try:
        return inspect_session(path, checks_kv=checks_kv)
    except StoreError as error:
        return error


def _of(records: list[Record], kind: RecordKind) -> list[Record]:
    return [record for record in records if record.header.kind is kind]


def _kept_kv(records: list[Record]) -> list[RecordHeader]:
    """The last piece of each turn and model."""
    kept = {(r.header.turn_index, r.header.identity): r.header for r in _of(records, RecordKind.KV)}
    return list(kept.values())


def _by_codec(headers: list[RecordHeader]) -> tuple[StoredKV, ...]:
    pieces, tokens, num_bytes = Counter(), Counter(), Counter()
    for header in headers:
        key = (header.kv.codec, header.kv.dtype)
        pieces[key] += 1
        tokens[key] += header.kv.num_tokens
        num_bytes[key] += header.payload_bytes
    return tuple(
        StoredKV(
            codec=key[0],
            dtype=key[1],
            num_pieces=pieces[key],
            num_tokens=tokens[key],
            num_bytes=num_bytes[key],
        )
        for key in sorted(pieces)
    )


def _kv_problem(file: io.FileIO, header: RecordHeader) -> str | None:
    payload = bytearray(header.payload_bytes)
    try:
        record_format.read_all(file.fileno(), memoryview(payload), header.payload_offset)
        reason = "wrong checksum"
    except OSError as error:  # of one page: the others are still to be looked at
        reason = error.strerror or str(error)
    else:
        if crc32c(payload) == header.payload_crc:
            return None
    what = "the system prompt" if header.turn_index == SYSTEM else f"turn {header.turn_index}"
    return f"KV of {what} at byte {header.payload_offset}: {reason}; it is computed again when needed"


def _is_locked(file: io.FileIO) -> bool:
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file.fileno(), fcntl.LOCK_UN)  # at once: an engine may want to open it
    return False
