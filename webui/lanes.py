"""Requests to the engine: as lanes while they can be told apart, as a profile of the load beyond.

Their times come from the engine's trace where the run has one (see `request_trace`). Else a planner's
exchange is divided as its ledger says: waiting first, then restore and recall, prefill, decode; what the
ledger does not name (the queue, the network) counts as waiting.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dayshift.engine.trace import RequestPhase
from dayshift.webui.records import ExchangeRecord
from dayshift.webui.request_trace import TracedRequest

MAX_LANES = 24
MAX_REQUESTS = 1500  # in a window; more are drawn as a profile
_PIXELS_PER_BIN = 3
_PHASES = (RequestPhase.QUEUED, RequestPhase.RESTORE, RequestPhase.PREFILL, RequestPhase.DECODE)


class Request(NamedTuple):
    """A request in seconds on the run clock, and how long it was in each phase."""

    sent_s: float
    answered_s: float
    waiting_s: float
    restore_s: float
    prefill_s: float
    decode_s: float
    robot: str  # "" for one that no robot of this run made
    name: str  # what else is known of it: the request's or the session's id
    exchange: int | None  # the robot's exchange with its planner

    @classmethod
    def of_exchange(cls, one: ExchangeRecord) -> Request:
        ledger = one.ledger
        restore_s = (ledger.restore_ms + ledger.recall_ms) / 1000
        prefill_s, decode_s = ledger.prefill_ms / 1000, ledger.decode_ms / 1000
        waiting_s = max(0.0, one.latency_s - restore_s - prefill_s - decode_s)
        return cls(
            one.at, one.end_s, waiting_s, restore_s, prefill_s, decode_s, one.robot, one.robot, one.idx
        )

    @classmethod
    def of_trace(cls, one: TracedRequest, *, robot: str, now_s: float) -> Request:
        """One that is still under way ends at `now_s`."""
        waiting_s, restore_s, prefill_s, decode_s = (one.seconds_in(phase, now_s) for phase in _PHASES)
        sent_s = one.phases[0][1]
        answered_s = one.phases[-1][1] if one.is_over else max(sent_s, now_s)
        name = robot or one.session or one.request
        return cls(sent_s, answered_s, waiting_s, restore_s, prefill_s, decode_s, robot, name, None)


class Requests:
    """Requests that are over, in the order in which they became known."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._times = np.empty((0, 6))  # the first six fields (s); maybe shorter

    def extend(self, requests: Sequence[Request]) -> None:
        """Take in requests that are over."""
        self._requests += requests

    def window(
        self,
        from_s: float,
        to_s: float,
        width: int,
        robot: str | None = None,
        under_way: Sequence[Request] = (),
    ) -> list[Request] | dict[str, list[float]]:
        """Requests in a window, of one robot or of all, in order of time; with those that are under way.

        More than MAX_REQUESTS come as a profile: {"t", "waiting", "restore", "prefill", "decode"}, each
        value the mean number of requests that were in that phase around t.
        """
        if new := self._requests[len(self._times) :]:
            self._times = np.concatenate([self._times, np.array([one[:6] for one in new])])
        inside = np.flatnonzero((self._times[:, 1] >= from_s) & (self._times[:, 0] <= to_s))
        if robot is not None:
            inside = [place for place in inside if self._requests[place].robot == robot]
        if len(inside) > MAX_REQUESTS:
            return _profile(self._times[inside], from_s, to_s, width)
        now = [one for one in under_way if one.sent_s <= to_s and robot in (None, one.robot)]
        return sorted([*(self._requests[place] for place in inside), *now])


def lay_out(requests: Sequence[Request]) -> dict[str, Any]:
    """Each request in the lowest lane that is free when it is sent; the last lane takes what is left.

    {"num_lanes", "rows": [lane, sent, answered, waiting, restore, prefill, decode, name, robot, exchange]}
    """
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # (until, lane)
    rows = []
    num_lanes = 0
    for one in requests:
        while busy and busy[0][0] <= one.sent_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, num_lanes = num_lanes, num_lanes + 1
        heapq.heappush(busy, (one.answered_s, lane))
        times = [round(seconds, 4) for seconds in one[:6]]
        rows.append([min(lane, MAX_LANES - 1), *times, one.name, one.robot, one.exchange])
    return {"num_lanes": min(num_lanes, MAX_LANES), "rows": rows}


def _profile(times: NDArray[np.float64], from_s: float, to_s: float, width: int) -> dict[str, list[float]]:
    num_bins = max(1, width // _PIXELS_PER_BIN)
    bin_s = (to_s - from_s) / num_bins
    bins = np.clip(((times[:, 0] - from_s) / bin_s).astype(np.int64), 0, num_bins - 1)
    profile = {"t": (from_s + (np.arange(num_bins) + 0.5) * bin_s).round(3).tolist()}
    for column, name in enumerate(("waiting", "restore", "prefill", "decode"), start=2):
        seconds = np.bincount(bins, weights=times[:, column], minlength=num_bins)
        profile[name] = (seconds / bin_s).round(4).tolist()
    return profile
