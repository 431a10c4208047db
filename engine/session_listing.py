"""Lists of all sessions, made a piece at a time between the engine's steps: a store may have thousands."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from dayshift.engine.api import EngineError, SessionInfo

logger = logging.getLogger(__name__)

_SLICE_S = 0.003  # of a list between two steps; at least one session


class SessionListing:
    """The lists that calls have asked for, one after the other. `infos` reads sessions as it is iterated."""

    def __init__(self, infos: Callable[[], Iterable[SessionInfo]]) -> None:
        self._infos = infos
        self._asked: deque[int] = deque()
        self._under_way: Iterator[SessionInfo] | None = None
        self._found: list[SessionInfo] = []

    @property
    def has_work(self) -> bool:
        """A list is not complete."""
        return bool(self._asked)

    def ask(self, call_id: int) -> None:
        """Begin a list, after those that were asked for before."""
        self._asked.append(call_id)

    def step(self) -> list[tuple[int, list[SessionInfo] | EngineError]]:
        """Go on with the first list for a moment; it and its call, if it is complete or has failed."""
        if not self._asked:
            return []
        ends_at = time.monotonic() + _SLICE_S
        try:
            if self._under_way is None:
                self._under_way = iter(self._infos())
            for info in self._under_way:
                self._found.append(info)
                if time.monotonic() > ends_at:
                    return []
            result = self._found
        except EngineError as error:
            result = error
        except Exception:
            logger.exception("the sessions could not be listed")
            result = EngineError("internal error, see the server's log")
        self._under_way, self._found = None, []
        return [(self._asked.popleft(), result)]
