"""What happens to each request, as events on the engine's own clock: the ring behind `/v1/trace`.

    queued ─► restore ─► prefill ─► decode ─► done | failed

Torch-free: the page's side reads these types too.
"""

from __future__ import annotations

import uuid
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

MAX_EVENTS = 32_768


class RequestPhase(StrEnum):
    """What a request is in from an event on."""

    QUEUED = "queued"  # it waits for a place in the batch, or for KV blocks
    RESTORE = "restore"  # its session's KV and recalled turns are brought back
    PREFILL = "prefill"
    DECODE = "decode"  # the first token is there
    DONE = "done"
    FAILED = "failed"  # refused, cancelled, or broken off by its client


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """A request enters a phase at `t` seconds on the engine's clock. `number` counts the engine's events."""

    number: int
    t: float
    request_id: str
    session_id: str | None
    phase: RequestPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTrace:
    """The events of one engine that a reader has not seen yet, oldest first.

    `now_s` is the engine's clock when it answered: it ties the events to the reader's clock.
    `cursor` asks for what comes after. `num_missed` events had left the ring before they were read.
    """

    engine_id: str
    now_s: float
    cursor: str
    num_missed: int
    events: tuple[TraceEvent, ...]


class Trace:
    """The newest events of one engine. Used by the engine's thread."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._engine_id = uuid.uuid4().hex[:12]
        self._events: deque[TraceEvent] = deque(maxlen=max_events)
        self._num_events = 0

    def add(self, t: float, request_id: str, session_id: str | None, phase: RequestPhase) -> None:
        """Note that a request enters a phase."""
        event = TraceEvent(
            number=self._num_events, t=t, request_id=request_id, session_id=session_id, phase=phase
        )
        self._events.append(event)
        self._num_events += 1

    def since(self, cursor: str, now_s: float) -> EngineTrace:
        """The events after a cursor, of this engine or of several; all that are kept for ""."""
        first = _own_part(cursor, self._engine_id)
        oldest = self._num_events - len(self._events)
        return EngineTrace(
            engine_id=self._engine_id,
            now_s=now_s,
            cursor=f"{self._engine_id}:{self._num_events}",
            num_missed=max(0, oldest - first),
            events=tuple(islice(self._events, max(0, first - oldest), None)),
        )


def join_cursors(traces: list[EngineTrace]) -> str:
    """One cursor for the traces of several engines: each of them finds its own part in it."""
    return ",".join(trace.cursor for trace in traces)


def _own_part(cursor: str, engine_id: str) -> int:
    for part in cursor.split(","):
        owner, _, number = part.partition(":")
        if owner == engine_id and number.isdigit():
            return int(number)
    return 0  # a cursor of an engine that ran before this one
