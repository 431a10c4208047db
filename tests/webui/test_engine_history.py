"""What an engine told of its requests and sessions is found again, at any time of the run."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine.api import SessionInfo
from dayshift.engine.trace import RequestPhase, Trace
from dayshift.webui import request_trace, session_records
from dayshift.webui.json_lines import LinesWriter
from dayshift.webui.records import ExchangeRecord, Ledger
from dayshift.webui.request_index import RequestIndex
from dayshift.webui.request_trace import TraceReader, TraceRecorder
from dayshift.webui.session_records import SessionReader, SessionRecorder

LIFE = (
    RequestPhase.QUEUED,
    RequestPhase.RESTORE,
    RequestPhase.PREFILL,
    RequestPhase.DECODE,
    RequestPhase.DONE,
)


def live(trace: Trace, request: str, session: str | None, times: list[float]) -> None:
    """A request that enters its phases at `times`, as far as they go."""
    for phase, t in zip(LIFE, times, strict=False):
        trace.add(t, request, session, phase)


def exchange(robot: str, idx: int, at: float, latency_s: float) -> ExchangeRecord:
    return ExchangeRecord(robot, idx, at, latency_s, 1, 1, 1, False, Ledger(), 0, False, True)


def session(session_id: str, **fields: object) -> SessionInfo:
    values = {
        "window": 512,
        "is_parked": False,
        "is_busy": False,
        "num_system_tokens": 10,
        "num_window_tokens": 100,
        "num_recalled_tokens": 0,
        "num_archived_tokens": 0,
        "num_kv_blocks": 7,
        "turns": (),
    }
    return SessionInfo(session_id=session_id, **(values | fields))  # type: ignore[arg-type]


class Recording:
    """A trace, its recorder and its reader, on a run clock that is 100 s behind the engine's."""

    def __init__(self, run_dir: Path) -> None:
        self.trace = Trace()
        self.writer = LinesWriter(run_dir / request_trace.FILE)
        self.recorder = TraceRecorder(self.writer, from_s=0.0)
        self.reader = TraceReader(run_dir)
        self.index = RequestIndex(self.reader, session_prefix="run")
        self._cursor = ""

    def look(self, now_s: float) -> None:
        found = self.trace.since(self._cursor, now_s + 100)
        self._cursor = found.cursor
        self.recorder.take([found], now_s)

    def rows(self, now_s: float, exchanges: dict[str, list[ExchangeRecord]] | None = None) -> list[list]:
        known = exchanges or {"robot-1": []}
        return self.index.window(0, 60, 600, robot=None, now_s=now_s, exchanges=known)["rows"]


def test_a_request_has_the_phases_that_the_engine_told(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    live(recording.trace, "a", "run-robot-1", [101, 103, 103.5, 104, 106])
    recording.look(7)
    talk = {"robot-1": [exchange("robot-1", 3, 0.9, 5.2), exchange("robot-1", 4, 9, 1)]}
    (row,) = recording.rows(7, talk)
    assert row == [0, 1.0, 6.0, 2.0, 0.5, 0.5, 2.0, "robot-1", "robot-1", 3]


def test_a_request_under_way_grows_until_it_is_over(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    live(recording.trace, "a", None, [101])
    recording.look(2)
    assert recording.rows(5) == [[0, 1.0, 5.0, 4.0, 0.0, 0.0, 0.0, "a", "", None]]
    for phase, t in zip(LIFE[1:], (106, 107, 108, 109), strict=True):
        recording.trace.add(t, "a", None, phase)
    recording.look(10)
    assert recording.rows(30) == [[0, 1.0, 9.0, 5.0, 1.0, 1.0, 1.0, "a", "", None]]


def test_the_clocks_are_tied_by_the_quickest_answer(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    cursor = ""
    for now_s, error_s, engine_s in ((5.0, 0.01, 105.0), (9.0, 3.0, 107.0)):  # the second took six seconds
        live(recording.trace, f"at {now_s}", None, [now_s + 99] * 5)
        found = recording.trace.since(cursor, engine_s)
        recording.recorder.take([found], now_s, error_s=error_s)
        cursor = found.cursor
    assert {row[7]: row[1] for row in recording.rows(50)} == {"at 5.0": 4.0, "at 9.0": 8.0}


def test_what_came_in_before_the_run_is_not_the_runs(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    live(recording.trace, "old", None, [98, 99, 101, 102])  # it ends within the run
    recording.look(5)
    assert not TraceReader(tmp_path).has_any
    assert "profile" not in recording.index.window(0, 9, 9, robot=None, now_s=9, exchanges={})


def test_a_request_that_a_killed_run_left_does_not_grow_in_the_resumed_one(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    live(recording.trace, "lost", None, [101, 102])
    recording.look(3)
    with (tmp_path / request_trace.FILE).open("ab") as file:
        file.write(b'{"type":"request","reque')  # killed in the middle of a line
    again = Recording(tmp_path)
    live(again.trace, "next", None, [121, 122, 123, 124, 125])
    again.look(30)
    assert [(row[1], row[2]) for row in again.rows(50)] == [(1.0, 2.0), (21.0, 25.0)]


def test_requests_of_two_robots_at_once_are_in_two_lanes_and_can_be_asked_for_alone(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    robots: dict[str, list[ExchangeRecord]] = {"robot-1": [], "robot-2": []}
    live(recording.trace, "a", "run-robot-1", [101, 101, 102, 103, 110])
    live(recording.trace, "b", "run-robot-2", [105, 105, 106, 107, 120])
    live(recording.trace, "c", "run-robot-1-fork-x", [111, 111, 112, 113, 114])
    recording.look(30)
    assert [(row[0], row[8]) for row in recording.rows(30, robots)] == [
        (0, "robot-1"),
        (1, "robot-2"),
        (0, ""),
    ]
    alone = recording.index.window(0, 60, 600, robot="robot-2", now_s=30, exchanges=robots)
    assert [row[7] for row in alone["rows"]] == ["robot-2"]


def test_many_requests_come_as_a_profile_that_keeps_their_time(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    for number in range(2000):
        begin = 100 + number * 0.02
        live(recording.trace, f"r{number}", None, [begin, begin, begin + 0.1, begin + 0.3, begin + 0.7])
    recording.look(60)
    profile = recording.index.window(0, 60, 600, robot=None, now_s=60, exchanges={})["profile"]
    bin_s = profile["t"][1] - profile["t"][0]
    assert sum(profile["prefill"]) * bin_s == pytest.approx(2000 * 0.2, rel=1e-3)
    assert sum(profile["decode"]) * bin_s == pytest.approx(2000 * 0.4, rel=1e-3)
    assert sum(profile["waiting"]) == 0


def test_a_run_without_a_trace_shows_its_exchanges(tmp_path: Path) -> None:
    index = RequestIndex(TraceReader(tmp_path), session_prefix="run")
    ledger = Ledger(restore_ms=100, recall_ms=200, prefill_ms=300, decode_ms=400)
    index.add_exchanges([exchange("robot-1", 1, 2.0, 1.5)._replace(ledger=ledger)])
    (row,) = index.window(0, 60, 600, robot=None, now_s=60, exchanges={"robot-1": []})["rows"]
    assert row == [0, 2.0, 3.5, 0.5, 0.3, 0.3, 0.4, "robot-1", "robot-1", 1]


def test_sessions_as_they_stood_at_any_time(tmp_path: Path) -> None:
    with LinesWriter(tmp_path / session_records.FILE) as writer:
        recorder = SessionRecorder(writer)
        recorder.take([session("a"), session("b")], 1.0)
        recorder.take([session("a"), session("b", is_parked=True)], 2.0)
        size = (tmp_path / session_records.FILE).stat().st_size
        recorder.take([session("a"), session("b", is_parked=True)], 3.0)
        assert (tmp_path / session_records.FILE).stat().st_size == size  # nothing has changed
        recorder.take([session("a")], 4.0)
    reader = SessionReader(tmp_path)
    assert reader.has_grown()
    assert not reader.has_grown()
    reader.refresh()
    assert [[(one.session_id, one.is_parked) for one in reader.at(t)] for t in (0.5, 1.0, 2.5, 4.0)] == [
        [],
        [("a", False), ("b", False)],
        [("a", False), ("b", True)],
        [("a", False)],
    ]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=12).filter(lambda piece: b"\n" not in piece), max_size=3))
def test_a_writer_cuts_off_what_a_kill_left(pieces: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / session_records.FILE
        for number, piece in enumerate([b"", *pieces]):
            with path.open("ab") as file:
                file.write(piece)
            with LinesWriter(path) as writer:
                SessionRecorder(writer).take([session(f"s{number}")], float(number))
        reader = SessionReader(Path(folder))
        reader.refresh()
        assert len(reader.at(time.time())) == len(pieces) + 1
