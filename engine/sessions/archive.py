"""Where a session's records are kept: in a file (`store.SessionFile`), or in memory (here)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from dayshift.engine.sessions.records import KVPiece, LayoutRecord, SessionRecord, TurnRecord
from dayshift.types import DayshiftError


class KVUnavailableError(DayshiftError):
    """A KV piece is missing, damaged or of another model: it has to be computed again from text."""


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
        """Raises KVUnavailableError."""
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

    def close(self) -> None:
        self._pieces.clear()
