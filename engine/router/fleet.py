"""The engines behind a router, and which one holds which session. Pure decisions, no I/O.

The table of sessions is a cache. What decides is the lock of the session's file: an engine that is
asked for a session of another one refuses, and the router asks the next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

import httpx

from dayshift.types import DayshiftError

MAX_KNOWN_SESSIONS = 100_000


class EngineState(StrEnum):
    """What the last health check, or a call since, found."""

    READY = "ready"
    DRAINING = "draining"  # finishes what runs and gives its sessions away
    DEAD = "dead"  # the server answers, its engine core has ended
    UNREACHABLE = "unreachable"


@dataclass(slots=True, eq=False)
class EngineLink:
    """One engine as the router sees it."""

    url: httpx.URL
    state: EngineState = EngineState.UNREACHABLE
    reason: str = "not asked yet"  # why it is not ready
    num_in_flight: int = 0  # requests of this router
    num_sessions: int = 0  # sessions that this router knows to be there
    lacks: set[str] = field(default_factory=set)  # policies that it said it does not serve

    @property
    def name(self) -> str:
        """Its URL, as the user gave it."""
        return str(self.url)


class Fleet:
    """The engines, and the sessions that each is known to hold.

    Raises DayshiftError for a URL that cannot be an engine's, or stands there twice.
    """

    def __init__(self, urls: Sequence[str], *, max_known_sessions: int = MAX_KNOWN_SESSIONS) -> None:
        if not urls:
            raise DayshiftError("a router needs at least one engine")
        self.engines = [EngineLink(_engine_url(url)) for url in urls]
        if len({engine.name for engine in self.engines}) < len(urls):
            raise DayshiftError("the same engine is given twice")
        self._max_known_sessions = max_known_sessions
        self._holders: OrderedDict[str, EngineLink] = OrderedDict()  # least recently called first

    @property
    def ready(self) -> list[EngineLink]:
        """The engines that take work."""
        return [engine for engine in self.engines if engine.state is EngineState.READY]

    def for_stateless(self) -> list[EngineLink]:
        """Whom to ask for a call without session: the fewest requests in flight first."""
        return sorted(self.ready, key=lambda engine: (engine.num_in_flight, engine.num_sessions))

    def for_policy(self, name: str | None) -> list[EngineLink]:
        """Whom to ask for a policy's actions: as for a call without session, but last who lacks it."""
        return sorted(self.for_stateless(), key=lambda engine: name in engine.lacks)

    def for_session(self, session_id: str | None) -> list[EngineLink]:
        """Whom to ask for a session: its holder, then the engine with the fewest sessions.

        None is a new session without a name yet.
        """
        holder = None if session_id is None else self._holders.get(session_id)
        return sorted(
            self.ready,
            key=lambda engine: (engine is not holder, engine.num_sessions, engine.num_in_flight),
        )

    def learn(self, session_id: str, engine: EngineLink) -> EngineLink | None:
        """The session is at `engine`. Returns the engine that held it before, if it was another."""
        before = self._holders.pop(session_id, None)
        if before is not None:
            before.num_sessions -= 1
        engine.num_sessions += 1
        self._holders[session_id] = engine
        if len(self._holders) > self._max_known_sessions:
            self.forget(next(iter(self._holders)))
        return None if before is engine else before

    def forget(self, session_id: str) -> None:
        """The session was deleted, or is not worth remembering."""
        holder = self._holders.pop(session_id, None)
        if holder is not None:
            holder.num_sessions -= 1

    def holder_of(self, session_id: str) -> EngineLink | None:
        """The engine where the session was last seen."""
        return self._holders.get(session_id)


@contextmanager
def one_in_flight(engine: EngineLink) -> Iterator[None]:
    """One more call is at the engine."""
    engine.num_in_flight += 1
    try:
        yield
    finally:
        engine.num_in_flight -= 1


def _engine_url(text: str) -> httpx.URL:
    try:
        url = httpx.URL(text.rstrip("/"))
    except httpx.InvalidURL as error:
        raise DayshiftError(f"--engine {text!r} is not a URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or url.raw_path not in (b"", b"/") or url.userinfo:
        raise DayshiftError(f"--engine {text!r}: http://HOST:PORT is expected, without path or password")
    return url
