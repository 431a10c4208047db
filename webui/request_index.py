"""Which requests were made when, by which robot, for which exchange with its planner."""

from __future__ import annotations

import bisect
from collections.abc import Container, Mapping, Sequence
from typing import Any

from dayshift.webui.lanes import Request, Requests, lay_out
from dayshift.webui.records import ExchangeRecord
from dayshift.webui.request_trace import TracedRequest, TraceReader

_SLACK_S = 0.05  # the planner's clock is read a moment before or after the engine's


class RequestIndex:
    """The requests of one run: from the engine's trace where it has one, else from its exchanges."""

    def __init__(self, trace: TraceReader, *, session_prefix: str) -> None:
        self.trace = trace
        self._session_prefix = session_prefix  # a robot's session is called by it and the robot's name
        self._traced, self._num_traced = Requests(), 0
        self._exchanged, self._exchanges = Requests(), list[ExchangeRecord]()

    def add_exchanges(self, exchanges: Sequence[ExchangeRecord]) -> None:
        """Take in a run's exchanges; they become requests when somebody looks."""
        self._exchanges += exchanges

    def window(
        self,
        from_s: float,
        to_s: float,
        width: int,
        *,
        robot: str | None,
        now_s: float,
        exchanges: Mapping[str, Sequence[ExchangeRecord]],
    ) -> dict[str, Any]:
        """{"num_lanes", "rows"} as of `lanes.lay_out`, or {"profile"} of many requests.

        `exchanges`: those of every robot of the run, in order of time.
        """
        self.trace.refresh()
        if self.trace.has_any:
            new, self._num_traced = self.trace.over[self._num_traced :], len(self.trace.over)
            self._traced.extend([self._of_trace(one, now_s, exchanges) for one in new])
            under_way = [self._of_trace(one, now_s, exchanges) for one in self.trace.under_way]
            found = self._traced.window(from_s, to_s, width, robot, under_way)
        else:
            self._exchanged.extend([Request.of_exchange(one) for one in self._exchanges])
            self._exchanges.clear()
            found = self._exchanged.window(from_s, to_s, width, robot)
        if isinstance(found, dict):
            return {"profile": found}
        return lay_out([_with_exchange(one, exchanges) for one in found])

    def _of_trace(self, one: TracedRequest, now_s: float, robots: Container[str]) -> Request:
        robot = (one.session or "").removeprefix(f"{self._session_prefix}-")
        return Request.of_trace(one, robot=robot if robot in robots else "", now_s=now_s)


def _with_exchange(one: Request, of_robot: Mapping[str, Sequence[ExchangeRecord]]) -> Request:
    """With the robot's exchange that was under way when the request came in."""
    if one.exchange is not None or not one.robot:
        return one
    exchanges = of_robot[one.robot]
    place = bisect.bisect_right(exchanges, one.sent_s + _SLACK_S, key=lambda exchange: exchange.at) - 1
    if place >= 0 and one.sent_s <= exchanges[place].end_s + _SLACK_S:
        return one._replace(exchange=exchanges[place].idx)
    return one
