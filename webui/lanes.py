"""Requests to the engine: as lanes while they can be told apart, as a profile of the load beyond.

A request's time is divided as its ledger says: waiting first, then restore and recall, prefill, decode.
What the ledger does not name (the queue, the network) counts as waiting.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dayshift.webui.records import ExchangeRecord

MAX_LANES = 24
MAX_REQUESTS = 1500  # in a window; more are drawn as a profile
_PIXELS_PER_BIN = 3


class Requests:
    """All requests of a run, in the order in which they became known."""

    def __init__(self) -> None:
        self._exchanges: list[ExchangeRecord] = []
        self._times = np.empty((0, 6))  # sent, answered, waiting, restore, prefill, decode (s); maybe shorter

    def extend(self, exchanges: list[ExchangeRecord]) -> None:
        """Take in requests; their times are divided when somebody looks."""
        self._exchanges += exchanges

    def window(self, from_s: float, to_s: float, width: int, robot: str | None = None) -> dict[str, Any]:
        """Requests in a window, of one robot or of all.

        Up to MAX_REQUESTS: {"num_lanes", "rows": [lane, sent, answered, waiting, restore, prefill, decode,
        robot, idx]}. More: {"profile": {"t", "waiting", "restore", "prefill", "decode"}}, each value the
        mean number of requests that were in that state around t.
        """
        if new := self._exchanges[len(self._times) :]:
            self._times = np.concatenate([self._times, np.array([_times(one) for one in new])])
        inside = np.flatnonzero((self._times[:, 1] >= from_s) & (self._times[:, 0] <= to_s))
        if robot is not None:
            inside = [place for place in inside if self._exchanges[place].robot == robot]
        if len(inside) > MAX_REQUESTS:
            return {"profile": _profile(self._times[inside], from_s, to_s, width)}
        ordered = sorted(inside, key=lambda place: self._times[place, 0])
        return _lay_out([(self._exchanges[place], self._times[place]) for place in ordered])


def _times(one: ExchangeRecord) -> tuple[float, float, float, float, float, float]:
    ledger = one.ledger
    restore = (ledger.restore_ms + ledger.recall_ms) / 1000
    prefill, decode = ledger.prefill_ms / 1000, ledger.decode_ms / 1000
    waiting = max(0.0, one.latency_s - restore - prefill - decode)
    return one.at, one.end_s, waiting, restore, prefill, decode


def _lay_out(requests: list[tuple[ExchangeRecord, NDArray[np.float64]]]) -> dict[str, Any]:
    """Each request in the lowest lane that is free when it is sent; the last lane takes what is left."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # (until, lane)
    rows = []
    num_lanes = 0
    for one, times in requests:
        while busy and busy[0][0] <= one.at:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, num_lanes = num_lanes, num_lanes + 1
        heapq.heappush(busy, (one.end_s, lane))
        rows.append([min(lane, MAX_LANES - 1), *times.round(4).tolist(), one.robot, one.idx])
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
