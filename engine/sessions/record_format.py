"""The bytes of a session file: record headers, pages, and the scan that finds what is whole.

docs/session-store.md describes the format byte by byte.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from crc32c import crc32c

PAGE_BYTES = 4096
FORMAT_VERSION = 1
NONCE_BYTES = 16
IDENTITY_BYTES = 32

_MAGIC = b"DSSR"
# magic, version, kind, sequence, offset, payload bytes, payload CRC, turn, nonce, identity,
# KV: dtype code, layers, tokens, heads, head_dim, codec code; epoch; zeros up to the header's own CRC.
_FIELDS = struct.Struct("<4sHHQQQIi16s32sIIIIIIQ")
_CRC = struct.Struct("<I")
HEADER_BYTES = 128
_MAX_INLINE_BYTES = PAGE_BYTES - HEADER_BYTES
_MAX_BYTES_PER_CALL = 1 << 30  # Linux moves less than 2 GiB in one call

KV_DTYPES = ("float32", "float16", "bfloat16")  # the code is the position
KV_CODECS = ("raw", "bf16", "int8", "fp8", "rot4", "residual")  # here too

type KVDims = tuple[int, int, int, int, int]


class RecordKind(IntEnum):
    """What a record holds."""

    SESSION = 1
    TURN = 2
    LAYOUT = 3
    KV = 4


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How a KV piece is written: the codec, and dtype and shape of what it reads back as."""

    codec: str
    dtype: str
    num_layers: int
    num_tokens: int
    num_kv_heads: int
    head_dim: int

    @property
    def dims(self) -> KVDims:
        """Keys and values, layers, tokens, heads, head dimension."""
        return (2, self.num_layers, self.num_tokens, self.num_kv_heads, self.head_dim)


NO_KV = KVFormat(KV_CODECS[0], KV_DTYPES[0], 0, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHeader:
    """The first bytes of a record. `nonce` is the file's own: no user text can look like a record."""

    kind: RecordKind
    sequence: int  # 0 for the first record of the file
    offset: int  # of the header in the file, a multiple of PAGE_BYTES
    payload_bytes: int
    payload_crc: int
    turn_index: int  # -1 where the record is about no turn, or about the system prompt
    nonce: bytes
    identity: bytes
    epoch: int  # of the lease under which it was written
    kv: KVFormat = NO_KV
    version: int = FORMAT_VERSION

    @property
    def is_inline(self) -> bool:
        """Whether the payload lies in the header's own page."""
        return self.payload_bytes <= _MAX_INLINE_BYTES

    @property
    def payload_offset(self) -> int:
        return self.offset + (HEADER_BYTES if self.is_inline else PAGE_BYTES)

    @property
    def payload_end(self) -> int:
        return self.payload_offset + self.payload_bytes

    @property
    def next_offset(self) -> int:
        """Where the next record begins."""
        return -(-self.payload_end // PAGE_BYTES) * PAGE_BYTES

    def pack_page(self, payload: memoryview) -> bytes:
        """The record's first page: header, inline payload, zeros."""
        kv = self.kv
        fields = _FIELDS.pack(
            _MAGIC,
            self.version,
            self.kind,
            self.sequence,
            self.offset,
            self.payload_bytes,
            self.payload_crc,
            self.turn_index,
            self.nonce,
            self.identity,
            KV_DTYPES.index(kv.dtype),
            *kv.dims[1:],
            KV_CODECS.index(kv.codec),
            self.epoch,
        ).ljust(HEADER_BYTES - _CRC.size, b"\0")
        header = fields + _CRC.pack(crc32c(fields))
        return (header + payload if self.is_inline else header).ljust(PAGE_BYTES, b"\0")


def unpack_header(page: bytes) -> RecordHeader | None:
    """The header at the start of a page; None if it is none, or damaged."""
    if len(page) < HEADER_BYTES or page[: len(_MAGIC)] != _MAGIC:
        return None
    fields = page[: HEADER_BYTES - _CRC.size]
    if _CRC.unpack_from(page, len(fields))[0] != crc32c(fields):
        return None
    _, version, kind, sequence, offset, payload_bytes, payload_crc, turn_index, nonce, identity, *kv = (
        _FIELDS.unpack_from(fields)
    )
    dtype, *dims, codec, epoch = kv
    if kind not in RecordKind:
        return None
    return RecordHeader(
        kind=RecordKind(kind),
        sequence=sequence,
        offset=offset,
        payload_bytes=payload_bytes,
        payload_crc=payload_crc,
        turn_index=turn_index,
        nonce=nonce,
        identity=identity,
        epoch=epoch,
        kv=KVFormat(_name(KV_CODECS, codec), _name(KV_DTYPES, dtype), *dims),
        version=version,
    )


def _name(names: tuple[str, ...], code: int) -> str:
    """The name of a code; a later version may have written one that is not known here."""
    return names[code] if code < len(names) else f"code {code}"


@dataclass(frozen=True, slots=True)
class Record:
    """A whole record. A KV piece's payload is left out: it is read and checked when it is needed."""

    header: RecordHeader
    payload: bytes


def scan(fd: int, file_bytes: int | None = None) -> Iterator[Record]:
    """The records of a file from its start, up to the first that is not whole.

    `file_bytes`: as if the file ended there; what an engine appends meanwhile is left out.
    """
    if file_bytes is None:
        file_bytes = os.fstat(fd).st_size
    offset, sequence, epoch, nonce = 0, 0, 0, None
    while (record := _read_record(fd, offset, file_bytes)) is not None:
        header = record.header
        if header.sequence != sequence or header.epoch < epoch or nonce not in (None, header.nonce):
            return
        yield record
        offset, sequence, epoch, nonce = header.next_offset, sequence + 1, header.epoch, header.nonce


def has_record_after(fd: int, offset: int, nonce: bytes, file_bytes: int | None = None) -> bool:
    """Whether a header of this file stands in any page after the one at `offset`.

    `file_bytes`: only before that. Where the file is an engine's, it must be the size before the scan that
    ended at `offset`: records that were appended since are no sign of damage.
    """
    if file_bytes is None:
        file_bytes = os.fstat(fd).st_size
    return next(_headers_after(fd, offset, nonce, file_bytes), None) is not None


def scan_past_damage(fd: int) -> Iterator[Record]:
    """All whole records of a file, also those behind damaged ones; of a file that nobody writes."""
    file_bytes = os.fstat(fd).st_size
    last: RecordHeader | None = None
    for record in scan(fd, file_bytes):
        last = record.header
        yield record
    if last is None:
        return
    for header in _headers_after(fd, last.next_offset, last.nonce, file_bytes):
        record = _read_record(fd, header.offset, file_bytes)
        if record is not None and header.sequence > last.sequence and header.offset >= last.next_offset:
            last = header
            yield record


def _headers_after(fd: int, offset: int, nonce: bytes, file_bytes: int) -> Iterator[RecordHeader]:
    for start in range(offset + PAGE_BYTES, file_bytes, PAGE_BYTES):
        header = unpack_header(os.pread(fd, PAGE_BYTES, start))
        if header is not None and (header.nonce, header.offset) == (nonce, start):
            yield header


def _read_record(fd: int, offset: int, file_bytes: int) -> Record | None:
    page = os.pread(fd, PAGE_BYTES, offset)
    header = unpack_header(page)
    if header is None or header.offset != offset or header.payload_end > file_bytes:
        return None
    if header.kind is RecordKind.KV:
        return Record(header, b"")
    payload = bytearray(header.payload_bytes)
    read_all(fd, memoryview(payload), header.payload_offset)
    return Record(header, bytes(payload)) if crc32c(payload) == header.payload_crc else None


def read_all(fd: int, buffer: memoryview, offset: int, num_needed: int | None = None) -> None:
    """Fill the buffer from the file, or at least its first `num_needed` bytes, where the file may end.

    Raises EOFError if the file ends before.
    """
    missing = len(buffer) if num_needed is None else num_needed
    while missing > 0:
        count = os.preadv(fd, [buffer[:_MAX_BYTES_PER_CALL]], offset)
        if count == 0:
            raise EOFError(f"the file ends {missing} bytes too early")
        buffer, offset, missing = buffer[count:], offset + count, missing - count


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all bytes at the offset."""
    num_done = 0
    while num_done < len(data):
        # Let go of at once: an error's traceback would keep it, and a mapping under it could not be closed.
        with data[num_done : num_done + _MAX_BYTES_PER_CALL] as part:
            num_done += os.pwrite(fd, part, offset + num_done)
