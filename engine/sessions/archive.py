"""Where a session's records are kept: in a file (`store.SessionFile`), or in memory (here)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from dayshift.engine.sessions.record_format import KVFormat
from dayshift.engine.sessions.records import KVPiece, LayoutRecord, SessionRecord, TurnRecord
from dayshift.types import DayshiftError


class KVUnavailableError(DayshiftError):
    """A KV piece is missing, damaged or of another model: it has to be computed again from text."""


class KVRead(Protocol):
    """A KV piece that is to be read. Made by `SessionArchive.open_kv`, in the engine's thread."""

    @property
    def turn_index(self) -> int: ...

    @property
    def form(self) -> KVFormat: ...

    @property
    def num_bytes(self) -> int:
        """Of its payload."""
        ...

    def run(self) -> KVPiece:
        """The piece, checked; in any thread, also while the archive is closed. Raises KVUnavailableError."""
        ...

    def give_up(self) -> None:
        """Let `run` raise at once, if it waits for a disk, or as soon as it is called."""
        ...


class SessionArchive(Protocol):
    """The records of one session. Appends are durable when they return.

    `has_foreign_tokens`: token ids of another model are among them and have to be made again.
    `is_lost`: another engine took the session over; this object is of no more use.
    """

    session: SessionRecord
    turns: list[TurnRecord]
    layout: LayoutRecord | None
    has_foreign_tokens: bool
    is_lost: bool

    def append_turn(self, turn: TurnRecord) -> None: ...

    def append_layout(self, layout: LayoutRecord) -> None: ...

    def append_kv(self, turn_index: int, piece: KVPiece) -> None: ...

    def has_kv(self, turn_index: int) -> bool: ...

    def read_kv(self, turn_index: int) -> KVPiece:
        """Waits for the disk. Raises KVUnavailableError."""
        ...

    def open_kv(self, turn_index: int) -> KVRead:
        """Raises KVUnavailableError."""
        ...

    def refuse_kv(self, read: KVRead) -> None:
        """A piece could not be read: it is not offered any more, and may be written again."""
        ...

    def close(self) -> None: ...


class MemoryArchive:
    """The archive of an engine without a store folder."""

    def __init__(self, session: SessionRecord, turns: Iterable[TurnRecord] = ()) -> None:
        self.session = session
        self.turns = list(turns)
        self.layout: LayoutRecord | None = None
        self.has_foreign_tokens = False
        self.is_lost = False
        self._pieces: dict[int, KVPiece] = {}

    def append_turn(self, turn: TurnRecord) -> None:
        self.turns.append(turn)

    def append_layout(self, layout: LayoutRecord) -> None:
        self.layout = layout

    def append_kv(self, turn_index: int, piece: KVPiece) -> None:
        self._pieces[turn_index] = piece

    def has_kv(self, turn_index: int) -> bool:
        return turn_index in self._pieces

    def read_kv(self, turn_index: int) -> KVPiece:
        if turn_index not in self._pieces:
            raise KVUnavailableError(f"no KV of turn {turn_index} is kept")
        return self._pieces[turn_index]

    def open_kv(self, turn_index: int) -> KVRead:
        return _MemoryRead(turn_index, self.read_kv(turn_index))

    def refuse_kv(self, read: KVRead) -> None:
        self._pieces.pop(read.turn_index, None)

    def close(self) -> None:
        self._pieces.clear()


@dataclass(slots=True)
class _MemoryRead:
    """A piece that is there already."""

    turn_index: int
    piece: KVPiece

    @property
    def form(self) -> KVFormat:
        return self.piece.format

    @property
    def num_bytes(self) -> int:
        return self.piece.data.nbytes

    def run(self) -> KVPiece:
        return self.piece

    def give_up(self) -> None:
        """It never waits."""
