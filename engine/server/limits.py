"""What one client may take of the server."""

from __future__ import annotations

import resource
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on requests; None: none.

    max_requests_per_key: calls under way at once with one API key (without keys, of all clients) ·
    max_request_tokens: prompt and longest possible replies of one HTTP request together, all its
    choices counted · body_timeout_s: for a request's body to arrive · request_timeout_s: for a call to
    be generated · max_unread_chunks: pieces of a streamed reply that wait for its reader; one that
    falls further behind is cancelled.
    """

    max_requests_per_key: int | None = None
    max_request_tokens: int | None = None
    body_timeout_s: float = 30.0
    request_timeout_s: float | None = None
    max_unread_chunks: int = 2048


NO_LIMITS = Limits()


def raise_open_files_limit() -> None:
    """Allow as many connections as the system lets this process have; each takes a file descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
