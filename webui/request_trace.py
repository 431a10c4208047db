"""The requests of a run's engine, phase by phase, as the engine's own trace told them.

    engine /v1/trace ─► TraceRecorder ─► runs/<id>/requests.jsonl ─► TraceReader

A request that is still under way has a line too; a later line of the same request replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from dayshift.engine.trace import EngineTrace, RequestPhase
from dayshift.webui.json_lines import LinesReader, LinesWriter

FILE = "requests.jsonl"
_ENDS = (RequestPhase.DONE, RequestPhase.FAILED)
# How much less a clock comparison is trusted for each look that passes: clocks of two machines drift.
_DRIFT_S = 1e-4


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """A recorder begins: what was under way before is not followed any more."""


class TracedRequest(msgspec.Struct, kw_only=True, tag="request"):
    """A request and when it entered its phases, in seconds on the run clock."""

    request: str
    session: str | None
    phases: list[tuple[RequestPhase, float]]

    @property
    def is_over(self) -> bool:
        return self.phases[-1][0] in _ENDS

    def seconds_in(self, phase: RequestPhase, now_s: float) -> float:
        """How long it was in a phase, up to now if it still is."""
        total = 0.0
        for place, (one, t) in enumerate(self.phases):
            if one is phase:
                end = self.phases[place + 1][1] if place + 1 < len(self.phases) else max(t, now_s)
                total += end - t
        return total


class TraceRecorder:
    """Writes down the requests that came in from `from_s` on, as the traces of a run's engines tell them."""

    def __init__(self, writer: LinesWriter, *, from_s: float) -> None:
        self._writer = writer
        self._from_s = from_s
        self._writer.append(Begun())
        self._under_way: dict[tuple[str, str], TracedRequest] = {}
        self._offsets: dict[str, tuple[float, float]] = {}  # engine -> (error, run clock minus its clock)

    def take(self, traces: Sequence[EngineTrace], now_s: float, *, error_s: float = 0.0) -> None:
        """Take in news. Raises OSError.

        `now_s` is the run clock's time at which the engines answered, give or take `error_s`.
        """
        changed: dict[tuple[str, str], TracedRequest] = {}
        for trace in traces:
            offset_s = self._offset(trace, now_s, error_s)
            for event in trace.events:
                key, t = (trace.engine_id, event.request_id), event.t + offset_s
                known = self._under_way.get(key)
                if known is None:
                    if event.phase is not RequestPhase.QUEUED or t < self._from_s:
                        continue  # it came in before
                    known = TracedRequest(request=event.request_id, session=event.session_id, phases=[])
                    self._under_way[key] = known
                known.phases.append((event.phase, round(t, 4)))
                changed[key] = known
                if known.is_over:
                    del self._under_way[key]
        self._writer.append(*changed.values())

    def _offset(self, trace: EngineTrace, now_s: float, error_s: float) -> float:
        """By the best of the comparisons of the two clocks: on a busy machine an answer can take seconds."""
        new = (error_s, now_s - trace.now_s)
        error, offset = self._offsets.get(trace.engine_id, new)
        self._offsets[trace.engine_id] = min(new, (error + _DRIFT_S, offset))
        return self._offsets[trace.engine_id][1]


class TraceReader:
    """The requests of a run, in the order in which they were first seen."""

    def __init__(self, run_dir: Path) -> None:
        self._lines = LinesReader[Begun | TracedRequest](run_dir / FILE, Begun | TracedRequest)
        self.over: list[TracedRequest] = []
        self._under_way: dict[str, TracedRequest] = {}

    def refresh(self) -> None:
        """Read what was written since."""
        for one in self._lines.read_new():
            if isinstance(one, Begun):
                self._break_off()
            elif one.is_over:
                self._under_way.pop(one.request, None)
                self.over.append(one)
            else:
                self._under_way[one.request] = one

    def _break_off(self) -> None:
        for one in self._under_way.values():
            one.phases.append((RequestPhase.FAILED, one.phases[-1][1]))
            self.over.append(one)
        self._under_way.clear()

    @property
    def under_way(self) -> list[TracedRequest]:
        return list(self._under_way.values())

    @property
    def has_any(self) -> bool:
        return bool(self.over or self._under_way)

    def has_grown(self) -> bool:
        """Whether something was written since this was last asked."""
        return self._lines.has_grown()
