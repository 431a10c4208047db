"""Copies of a session: for export, import, takeover and repair, and without its KV for the quota."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace

import msgspec
from crc32c import crc32c

from dayshift.engine.sessions import record_format
from dayshift.engine.sessions.lease import Lease
from dayshift.engine.sessions.payload_io import PayloadIO
from dayshift.engine.sessions.record_format import Record, RecordKind
from dayshift.engine.sessions.record_writer import RecordWriter
from dayshift.engine.sessions.records import SessionRecord


def copy_session(
    source: io.FileIO,
    target: io.FileIO,
    lease: Lease | None,
    *,
    with_kv: bool,
    session_id: str | None = None,
    records: Iterable[Record] | None = None,
) -> None:
    """Write a session's whole records into an empty file: all text, and the layout and KV that count.

    Every record keeps its identity. Damaged KV is left out. `session_id` gives the copy another id.
    `records`: these instead of those from the source's start to the first that is not whole; payloads of KV
    are read from the source. The target is durable when this returns. Raises OSError.
    """
    records = list(record_format.scan(source.fileno()) if records is None else records)
    last = {
        (record.header.kind, record.header.turn_index, record.header.identity): record for record in records
    }
    layouts = [record for record in records if record.header.kind is RecordKind.LAYOUT]
    nonce = os.urandom(record_format.NONCE_BYTES)
    with closing(PayloadIO(target, is_direct=False, deadline_s=math.inf)) as payloads:
        writer = RecordWriter(target, payloads, nonce, lease, syncs_each=False)
        for record in records:
            header = record.header
            match header.kind:
                case RecordKind.LAYOUT if record is not layouts[-1]:
                    continue
                case RecordKind.KV if (
                    not with_kv or record is not last[header.kind, header.turn_index, header.identity]
                ):
                    continue
            payload = _payload(source, record, session_id)
            if payload is not None:
                writer.append(
                    header.kind, payload, identity=header.identity, turn_index=header.turn_index, kv=header.kv
                )
    os.fsync(target.fileno())


def _payload(source: io.FileIO, record: Record, session_id: str | None) -> memoryview | None:
    """A record's payload for the copy; None for damaged KV."""
    header = record.header
    if header.kind is RecordKind.SESSION and session_id is not None:
        session = msgspec.json.decode(record.payload, type=SessionRecord)
        return memoryview(msgspec.json.encode(replace(session, session_id=session_id)))
    if header.kind is not RecordKind.KV:
        return memoryview(record.payload)
    payload = bytearray(header.payload_bytes)
    record_format.read_all(source.fileno(), memoryview(payload), header.payload_offset)
    return memoryview(payload) if crc32c(payload) == header.payload_crc else None
