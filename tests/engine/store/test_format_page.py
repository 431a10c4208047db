"""docs/session-store.md describes the files: a session is read here by the page's table alone."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import crc32c
import pytest

from dayshift.engine.sessions import codecs
from dayshift.engine.sessions.record_format import KV_CODECS, KV_DTYPES, RecordKind
from dayshift.engine.sessions.store import SessionStore
from tests.engine.store.samples import IDENTITY, make_turn, path_of, write_sample

PAGE = (Path(__file__).parents[3] / "docs" / "session-store.md").read_text(encoding="utf-8")
PAGE_BYTES, HEADER_BYTES = 4096, 128
_FORMATS = {"u16": "H", "u32": "I", "i32": "i", "u64": "Q", "4 × u32": "4I"}

Fields = dict[str, tuple[slice, str, str]]  # first words -> bytes, type, text


def header_table() -> Fields:
    rows = re.findall(r"^\| (\d+)–(\d+) \|\s*([^|]*?)\s*\| (.*) \|$", PAGE.partition("## Records")[2], re.M)
    return {
        re.split(r"[,:;(]", text)[0].strip(): (slice(int(first), int(last) + 1), kind.strip(), text)
        for first, last, kind, text in rows
    }


FIELDS = header_table()


def value(header: bytes, name: str) -> int:
    where, kind, _ = FIELDS[name]
    return struct.unpack("<" + _FORMATS[kind], header[where])[0]


def test_the_table_covers_the_header_without_gap_or_overlap() -> None:
    covered = [place for where, _, _ in FIELDS.values() for place in range(where.start, where.stop)]
    assert covered == list(range(HEADER_BYTES))


def test_codes_are_those_of_the_program() -> None:
    for name, names in (("KV dtype", KV_DTYPES), ("KV codec", KV_CODECS)):
        codes = re.findall(r"(\d+) (\w+)", FIELDS[name][2])
        assert codes == [(str(code), word) for code, word in enumerate(names)]
    assert re.findall(r"(\d+) (\w+)", FIELDS["kind"][2]) == [
        (str(int(kind)), kind.name if kind is RecordKind.KV else kind.name.lower()) for kind in RecordKind
    ]
    described = re.findall(r"^\| (\w+) \| ", PAGE.partition("## Codecs of KV")[2].partition("## ")[0], re.M)
    assert tuple(described[1:]) == tuple(codecs.CODECS) == KV_CODECS


def test_a_file_is_read_by_the_page_alone(store: SessionStore) -> None:
    turns, piece, _ = write_sample(store)
    with store.open("s") as file:
        file.append_turn(make_turn(3))
    data = path_of(store).read_bytes()
    kinds, epochs, texts, offset, sequence = [], [], [], 0, 0
    while offset < len(data):
        header = data[offset : offset + HEADER_BYTES]
        assert header[FIELDS["`DSSR`"][0]] == b"DSSR"
        assert value(header, "format version") == 1
        assert value(header, "CRC32C of bytes 0–123") == crc32c.crc32c(header[:124])
        assert value(header, "sequence number of the record in its file") == sequence
        assert value(header, "offset of this header in the file") == offset
        assert header[FIELDS["identity"][0]] == IDENTITY
        assert header[FIELDS["nonce"][0]] == data[FIELDS["nonce"][0]]
        length = value(header, "payload length in bytes")
        start = offset + (HEADER_BYTES if length <= PAGE_BYTES - HEADER_BYTES else PAGE_BYTES)
        payload = data[start : start + length]
        assert value(header, "CRC32C of the payload") == crc32c.crc32c(payload)
        kinds.append(value(header, "kind"))
        epochs.append(value(header, "epoch of the lease under which the record was written"))
        if kinds[-1] == 4:
            assert payload == piece.data.tobytes()
            where, kind, _ = FIELDS["KV"]
            assert struct.unpack("<" + _FORMATS[kind], header[where]) == piece.format.dims[1:]
            assert value(header, "KV codec") == 0
        else:
            texts.append(payload.decode())
        offset, sequence = -(-(start + length) // PAGE_BYTES) * PAGE_BYTES, sequence + 1
    assert kinds == [1, 2, 2, 4, 3, 2, 2]
    assert epochs == [1] * 6 + [2]
    assert f'"reply {turns[2].index}"' in texts[4]


@pytest.mark.parametrize("name", ["s.session", "s.lease"])
def test_the_lease_is_beside_the_session(store: SessionStore, name: str) -> None:
    write_sample(store)
    assert (store.root / name).is_file()
    lease = (store.root / "s.lease").read_bytes()
    assert lease[:4] == b"DSSL"
    assert struct.unpack("<QI", lease[4:]) == (1, crc32c.crc32c(lease[:12]))
