"""How far an engine is that closes: much KV in host memory takes a disk minutes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

from dayshift.engine.sessions.session import Session

logger = logging.getLogger(__name__)

_SAYS_EVERY_S = 2.0


def said_on_the_way(sessions: Sequence[Session]) -> Iterator[Session]:
    """The sessions, one after the other; now and then the log is told how many are behind us."""
    said_at = time.monotonic()
    for num_done, session in enumerate(sessions):
        if (now := time.monotonic()) - said_at > _SAYS_EVERY_S:
            logger.warning("closing: %d of %d sessions are in the store", num_done, len(sessions))
            said_at = now
        yield session
