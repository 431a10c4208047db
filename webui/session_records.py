"""The engine's sessions over a run: how each stood whenever it was looked at and had changed.

engine /v1/sessions ─► SessionRecorder ─► runs/<id>/sessions.jsonl ─► SessionReader
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dayshift.engine.api import SessionInfo
from dayshift.webui.json_lines import LinesReader, LinesWriter

FILE = "sessions.jsonl"


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """A session without its turns' texts."""

    session_id: str
    window: int
    is_parked: bool
    is_busy: bool
    num_system_tokens: int
    num_window_tokens: int
    num_recalled_tokens: int
    num_archived_tokens: int
    num_kv_blocks: int
    num_turns: int

    @classmethod
    def of(cls, info: SessionInfo) -> SessionState:
        fields = {name: getattr(info, name) for name in cls.__struct_fields__ if name != "num_turns"}
        return cls(**fields, num_turns=len(info.turns))


class SessionLine(msgspec.Struct, frozen=True, kw_only=True):
    """How a session stood from `t` on (seconds on the run clock); `state` None: it was closed."""

    t: float
    session_id: str
    state: SessionState | None


class SessionRecorder:
    """Writes down the sessions that have changed since the last look."""

    def __init__(self, writer: LinesWriter) -> None:
        self._writer = writer
        self._known: dict[str, SessionState] = {}

    def take(self, infos: Sequence[SessionInfo], now_s: float) -> None:
        """Take in all sessions as they are now. Raises OSError."""
        now = {info.session_id: SessionState.of(info) for info in infos}
        lines = [
            SessionLine(t=round(now_s, 3), session_id=session_id, state=now.get(session_id))
            for session_id in sorted(now.keys() | self._known.keys())
            if now.get(session_id) != self._known.get(session_id)
        ]
        self._known = now
        self._writer.append(*lines)


class SessionReader:
    """The sessions of a run at any time."""

    def __init__(self, run_dir: Path) -> None:
        self._lines = LinesReader[SessionLine](run_dir / FILE, SessionLine)
        self._times: dict[str, list[float]] = {}
        self._states: dict[str, list[SessionState | None]] = {}

    def refresh(self) -> None:
        """Read what was written since."""
        for line in self._lines.read_new():
            self._times.setdefault(line.session_id, []).append(line.t)
            self._states.setdefault(line.session_id, []).append(line.state)

    def has_grown(self) -> bool:
        """Whether something was written since this was last asked."""
        return self._lines.has_grown()

    def at(self, t: float) -> list[SessionState]:
        """The sessions that there were at `t`, by id; as the last look up to then saw them."""
        found = []
        for session_id, times in sorted(self._times.items()):
            place = bisect.bisect_right(times, t) - 1
            state = self._states[session_id][place] if place >= 0 else None
            if state is not None:
                found.append(state)
        return found

    @property
    def has_any(self) -> bool:
        return bool(self._times)
