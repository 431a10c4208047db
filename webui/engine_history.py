"""Keeps what an engine tells of its requests and sessions in a run's folder.

What the engine cannot tell (it is starting, or gone) leaves a gap.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import httpx
import msgspec

from dayshift.engine.api import SessionInfo
from dayshift.engine.trace import EngineTrace, join_cursors
from dayshift.webui import request_trace, session_records
from dayshift.webui.json_lines import LinesWriter
from dayshift.webui.request_trace import TraceRecorder
from dayshift.webui.session_records import SessionRecorder

SESSIONS_PERIOD_S = 1.0
# A list of sessions holds their turns: of long ones it is asked less often, for 2 % of the engine's time.
_SESSIONS_SHARE = 0.02
logger = logging.getLogger(__name__)
_decode_traces = msgspec.json.Decoder(dict[str, list[EngineTrace]]).decode
_decode_sessions = msgspec.json.Decoder(dict[str, list[SessionInfo]]).decode


class EngineHistory:
    """Of requests that came in from `from_s` on. Use as a context manager.

    `now` gives seconds on the run clock.
    """

    def __init__(self, run_dir: Path, url: str, *, now: Callable[[], float], from_s: float) -> None:
        self._http = httpx.Client(base_url=url, timeout=2.0, trust_env=False)
        self._now = now
        self._files = [LinesWriter(run_dir / one.FILE) for one in (request_trace, session_records)]
        self._trace = TraceRecorder(self._files[0], from_s=from_s)
        self._sessions = SessionRecorder(self._files[1])
        self._cursor = ""
        self._has_news = True
        self._sessions_due_at = 0.0

    def sample(self) -> None:
        """Take in what has happened since. Raises OSError."""
        try:
            self._sample_requests()
            if self._has_news and time.monotonic() >= self._sessions_due_at:
                self._sample_sessions()
        except httpx.HTTPError:
            return

    def _sample_requests(self) -> None:
        before_s = self._now()
        reply = self._http.get("/v1/trace", params={"cursor": self._cursor}).raise_for_status()
        after_s = self._now()
        traces = _decode_traces(reply.content)["traces"]
        num_missed = sum(trace.num_missed for trace in traces)
        if self._cursor and num_missed:
            logger.warning("monitor: %d events of the engine's trace were missed", num_missed)
        self._cursor = join_cursors(traces)
        self._has_news |= any(trace.events for trace in traces)
        self._trace.take(traces, (before_s + after_s) / 2, error_s=(after_s - before_s) / 2)

    def _sample_sessions(self) -> None:
        began_at = time.monotonic()
        reply = self._http.get("/v1/sessions").raise_for_status()
        self._sessions.take(_decode_sessions(reply.content)["sessions"], self._now())
        now = time.monotonic()
        self._sessions_due_at = now + max(SESSIONS_PERIOD_S, (now - began_at) / _SESSIONS_SHARE)
        self._has_news = False

    def close(self) -> None:
        """Look for the last time."""
        self._sessions_due_at = 0.0
        self.sample()
        for file in self._files:
            file.close()
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
