"""Everything known of a run, in memory and in order of time: the page's questions are answered from it.

Texts, frames and pictures stay on the disk. `refresh` takes in what was recorded since; what is going
on and not yet recorded comes from the live feed (see `live`).
"""

from __future__ import annotations

import bisect
import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dayshift.types import Outcome
from dayshift.webui.records import (
    AttemptRecord,
    ExchangeRecord,
    HoursRecord,
    RecordsReader,
    StepRecord,
)
from dayshift.webui.request_index import RequestIndex
from dayshift.webui.request_trace import TraceReader
from dayshift.webui.series import SeriesReader
from dayshift.webui.session_records import SessionReader

OUTCOME_CODES = {Outcome.DONE: 0, Outcome.FAILED: 1, Outcome.INFRA: 2}
REVIEW_CODE = 4  # added to an outcome's code in a review


class LogEntry(NamedTuple):
    """A line of the log, before it is put into words. `ref` is an attempt's or an exchange's place."""

    t: float
    kind: str  # "attempt", "exchange", "hours_start", "hours_end"
    robot: str
    ref: int


@dataclass(slots=True)
class RobotIndex:
    """One robot's records, each list in order of time."""

    steps: list[StepRecord] = field(default_factory=list)
    attempts: list[AttemptRecord] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)  # of `attempts`
    exchanges: list[ExchangeRecord] = field(default_factory=list)
    hours: list[HoursRecord] = field(default_factory=list)
    revision: int = 0  # raised by every change
    _turns: list[int] = field(default_factory=list)  # session turn -> exchange

    def exchange_of_turn(self, turn: int) -> int | None:
        """The number of the exchange that became this turn of the planner's session.

        Exchanges without a reply are no turns.
        """
        return self._turns[turn] if 0 <= turn < len(self._turns) else None

    def add_exchange(self, exchange: ExchangeRecord) -> None:
        self.exchanges.append(exchange)
        if exchange.is_answered:
            self._turns.append(exchange.idx)

    def attempt_at(self, t: float) -> AttemptRecord | None:
        """The attempt that runs at `t`, or else the last one before."""
        place = bisect.bisect_right(self.starts, t) - 1
        return self.attempts[place] if place >= 0 else None


class RunIndex:
    """The records of one run. Used by one thread."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.records = RecordsReader(run_dir)
        self.series = SeriesReader(run_dir)
        self.requests = RequestIndex(TraceReader(run_dir), session_prefix=self.records.run_id)
        self.sessions = SessionReader(run_dir)
        self.run = self.records.run()
        self.robots: dict[str, RobotIndex] = {}
        self.robot_rows = self.records.robots()
        self.attempts: dict[str, AttemptRecord] = {}
        self.end_s = 0.0
        self.revision = 0  # raised by every change of the records
        self.growth = 0  # raised by those of series, requests and sessions too
        self._last_attempt_s = self._last_exchange_s = float("-inf")
        self._bars: dict[str, Bars] = {}
        self._log: list[LogEntry] | None = None
        self._jumps: dict[str, list[Jump]] = {}
        self.refresh()
        gc.freeze()  # a hundred thousand records that stay: the collector need not go through them

    def refresh(self) -> bool:
        """Take in what was recorded since. True when something was."""
        with _no_garbage_collection():
            has_grown = self.series.refresh() | self.requests.trace.has_grown() | self.sessions.has_grown()
            has_changed = self._take_records()
        self.growth += has_grown or has_changed
        return has_grown or has_changed

    def _take_records(self) -> bool:
        if not self.records.has_changed():
            return False
        if not self.robot_rows:
            self.robot_rows = self.records.robots()
        self.revision += 1
        changed = self._take_attempts() | self._take_exchanges()
        self._take_steps_and_hours(changed)
        self._bars.clear()
        self._jumps.clear()
        self._log = None
        return True

    def robot(self, name: str) -> RobotIndex:
        """A robot's records; empty ones for a robot that has none yet."""
        if name not in self.robots:
            self.robots[name] = RobotIndex()
        return self.robots[name]

    def bars(self, robot: str) -> Bars:
        """A robot's attempts as bars."""
        if robot not in self._bars:
            self._bars[robot] = Bars.of(self.robot(robot).attempts)
        return self._bars[robot]

    @property
    def num_lines(self) -> int:
        """Of the log, without putting it in order."""
        return sum(
            len(robot.attempts)
            + len(robot.exchanges)
            + sum(1 if one.end_s is None else 2 for one in robot.hours)
            for robot in self.robots.values()
        )

    @property
    def log(self) -> list[LogEntry]:
        """All lines, in order of time."""
        if self._log is None:
            with _no_garbage_collection():
                self._log = sorted(_log_entries(self.robots), key=itemgetter(0))
        return self._log

    def jumps(self, kind: str) -> list[Jump]:
        """The moments of a kind that the page can jump to, in order: failure, review, recall."""
        if kind not in self._jumps:
            self._jumps[kind] = sorted(_JUMPS[kind](self.robots))
        return self._jumps[kind]

    def close(self) -> None:
        self.records.close()

    def _take_attempts(self) -> set[str]:
        changed = set()
        for attempt in self.records.attempts(self._last_attempt_s):
            if attempt.attempt_id in self.attempts:
                continue
            self.attempts[attempt.attempt_id] = attempt
            robot = self.robot(attempt.robot)
            robot.attempts.append(attempt)
            robot.starts.append(attempt.start_s)
            changed.add(attempt.robot)
            self._last_attempt_s = max(self._last_attempt_s, attempt.end_s)
        self.end_s = max(self.end_s, self._last_attempt_s)
        return changed

    def _take_exchanges(self) -> set[str]:
        changed, new = set(), []
        for exchange in self.records.exchanges(self._last_exchange_s):
            robot = self.robot(exchange.robot)
            if robot.exchanges and exchange.idx <= robot.exchanges[-1].idx:
                continue
            robot.add_exchange(exchange)
            new.append(exchange)
            changed.add(exchange.robot)
        if new:
            self._last_exchange_s = max(self._last_exchange_s, max(exchange.at for exchange in new))
            self.end_s = max(self.end_s, max(exchange.at + exchange.latency_s for exchange in new))
            self.requests.add_exchanges(new)
        return changed

    def _take_steps_and_hours(self, changed: set[str]) -> None:
        steps: dict[str, list[StepRecord]] = defaultdict(list)
        hours: dict[str, list[HoursRecord]] = defaultdict(list)
        for step in self.records.steps():
            steps[step.robot].append(step)
        for one in self.records.hours():
            hours[one.robot].append(one)
            self.end_s = max(self.end_s, one.end_s or one.start_s)
        for name in steps.keys() | hours.keys():
            robot = self.robot(name)
            if name in changed or robot.steps != steps[name] or robot.hours != hours[name]:
                robot.steps, robot.hours = steps[name], hours[name]
                robot.revision = self.revision


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """For code that makes a hundred thousand objects and no cycles: the collector would go through all
    of them again and again, a third of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Jump(NamedTuple):
    """A moment worth looking at."""

    t: float
    robot: str
    attempt_id: str | None = None
    exchange: int | None = None


def _failures(robots: dict[str, RobotIndex]) -> list[Jump]:
    """The end of each failed attempt."""
    return [
        Jump(attempt.end_s, name, attempt_id=attempt.attempt_id)
        for name, robot in robots.items()
        for attempt in robot.attempts
        if attempt.outcome != Outcome.DONE
    ]


def _reviews(robots: dict[str, RobotIndex]) -> list[Jump]:
    return [Jump(one.start_s, name) for name, robot in robots.items() for one in robot.hours if one.is_review]


def _recalls(robots: dict[str, RobotIndex]) -> list[Jump]:
    """Each call for which archived turns were put back, when its reply was there."""
    return [
        Jump(exchange.end_s, name, exchange=exchange.idx)
        for name, robot in robots.items()
        for exchange in robot.exchanges
        if exchange.num_recalled
    ]


_JUMPS = {"failure": _failures, "review": _reviews, "recall": _recalls}


def _log_entries(robots: dict[str, RobotIndex]) -> list[LogEntry]:
    entries = []
    for name, robot in robots.items():
        entries += [LogEntry(a.end_s, "attempt", name, i) for i, a in enumerate(robot.attempts)]
        entries += [LogEntry(e.end_s, "exchange", name, i) for i, e in enumerate(robot.exchanges)]
        entries += [LogEntry(h.start_s, "hours_start", name, i) for i, h in enumerate(robot.hours)]
        entries += [
            LogEntry(h.end_s, "hours_end", name, i) for i, h in enumerate(robot.hours) if h.end_s is not None
        ]
    return entries


@dataclass(frozen=True, slots=True)
class Bars:
    """Intervals in order of time that do not overlap, with a code each."""

    starts: NDArray[np.float64]  # (n,)
    ends: NDArray[np.float64]  # (n,)
    codes: NDArray[np.int64]  # (n,): OUTCOME_CODES, REVIEW_CODE added in a review

    @classmethod
    def of(cls, attempts: list[AttemptRecord]) -> Bars:
        codes = [
            OUTCOME_CODES[Outcome(one.outcome)] + (REVIEW_CODE if one.is_review else 0) for one in attempts
        ]
        return cls(
            np.array([one.start_s for one in attempts], np.float64),
            np.array([one.end_s for one in attempts], np.float64),
            np.array(codes, np.int64),
        )

    def window(self, from_s: float, to_s: float, width: int) -> list[tuple[float, float, int]]:
        """(start, end, code) of the bars in a window; bars within one of `width` pixels become one.

        The merged bar has the code that matters most: a failure hides no success of an hour, but the
        other way round it would.
        """
        first = int(np.searchsorted(self.ends, from_s, "right"))
        last = int(np.searchsorted(self.starts, to_s, "left"))
        starts, ends, codes = self.starts[first:last], self.ends[first:last], self.codes[first:last]
        if len(starts) == 0:
            return []
        pixel_s = (to_s - from_s) / width
        # A bar joins the one before when it is thinner than a pixel and ends in the same pixel.
        pixels = np.floor((ends - from_s) / pixel_s).astype(np.int64)
        is_thin = ends - starts < pixel_s
        begins = np.ones(len(starts), bool)
        begins[1:] = ~(is_thin[1:] & is_thin[:-1] & (pixels[1:] == pixels[:-1]))
        groups = np.flatnonzero(begins)
        return list(
            zip(
                starts[groups].round(3).tolist(),
                np.maximum.reduceat(ends, groups).round(3).tolist(),
                np.maximum.reduceat(codes, groups).tolist(),
                strict=True,
            )
        )
