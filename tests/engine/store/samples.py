"""Sessions for tests of the store."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dayshift.engine.api import Message
from dayshift.engine.sessions.record_format import PAGE_BYTES, KVFormat
from dayshift.engine.sessions.records import KVPiece, LayoutRecord, SessionRecord, TurnRecord
from dayshift.engine.sessions.store import SessionStore

IDENTITY, OTHER_IDENTITY = bytes(range(32)), bytes(32)


def make_turn(index: int, num_characters: int = 20) -> TurnRecord:
    """A turn whose text has a given length; a page holds some 3,800 characters of it."""
    choose = random.Random(index).choices
    text = "".join(choose('Shift 12é機\n"\\', k=num_characters))
    messages = (Message("user", text), Message("assistant", f"reply {index}"))
    return TurnRecord(index=index, at=index * 0.1, messages=messages, token_ids=(index, 7, 151_000))


def make_piece(num_tokens: int, dtype: str = "float32", seed: int = 0, codec: str = "raw") -> KVPiece:
    """Random bytes in the place of a codec's: the store does not look into them."""
    itemsize = 4 if dtype == "float32" else 2
    data = np.random.default_rng(seed).bytes(2 * 3 * num_tokens * 2 * 4 * itemsize)
    return KVPiece(KVFormat(codec, dtype, 3, num_tokens, 2, 4), np.frombuffer(data, np.uint8))


SESSION = SessionRecord(
    session_id="s",
    system="You lead a robot.",
    system_token_ids=(1, 2, 3),
    window=768,
    high_water=1.0,
    low_water=0.75,
    recall_budget=768,
)


def same_piece(a: KVPiece, b: KVPiece) -> bool:
    return (a.format, a.data.tobytes()) == (b.format, b.data.tobytes())


def path_of(store: SessionStore, session_id: str = "s") -> Path:
    return store.root / f"{session_id}.session"


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond: a write fails as on a full disk, part of it written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_sample(store: SessionStore) -> tuple[list[TurnRecord], KVPiece, list[int]]:
    """A small session of every kind of record. Returns turns, the KV of turn 1, record ends."""
    ends: list[int] = []
    turns = [make_turn(0), make_turn(1, 4500), make_turn(2)]
    piece = make_piece(100)
    with store.create(SESSION) as file:

        def note_end() -> None:
            ends.append(path_of(store).stat().st_size)

        note_end()
        file.append_turn(turns[0])
        note_end()
        file.append_turn(turns[1])
        note_end()
        file.append_kv(1, piece)
        note_end()
        file.append_layout(LayoutRecord(num_turns=2, window_turns=(1,), recalled_turns=(0,)))
        note_end()
        file.append_turn(turns[2])
        note_end()
    return turns, piece, ends


def page_after(end: int) -> int:
    """Where the next record begins."""
    return -(-end // PAGE_BYTES) * PAGE_BYTES
