"""The shift board and the totals: how each job step of a run stands, and stood at any time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dayshift.webui.run_index import RobotIndex


def describe_board(robot: RobotIndex) -> dict[str, Any]:
    """A robot's plan and attempts as the page keeps them; the page knows from them the state at any time.

    `attempts` name their step by its place in `steps`; `ends` says when each step was over.
    """
    places = {step.key: place for place, step in enumerate(robot.steps)}
    return {
        "revision": robot.revision,
        "steps": [
            [step.shift, step.job, step.step, step.is_review, step.task, step.state, step.reason]
            for step in robot.steps
        ],
        "ends": [None if end is None else round(end, 3) for end in step_ends(robot)],
        "attempts": [
            [
                one.attempt_id,
                places.get(one.key, -1),
                one.number,
                one.outcome,
                round(one.start_s, 3),
                round(one.end_s, 3),
                one.num_control_steps,
                one.detail,
            ]
            for one in robot.attempts
        ],
        "hours": [[one.shift, one.is_review, one.start_s, one.end_s] for one in robot.hours],
    }


def step_ends(robot: RobotIndex) -> list[float | None]:
    """When each step was over, None while it is not.

    That is when its last attempt ended, or, for a step given up without one, its last exchange.
    """
    last: dict[tuple[int, int, int, bool], float] = {}
    for exchange in robot.exchanges:
        if exchange.job is not None and exchange.step is not None:
            last[exchange.shift, exchange.job, exchange.step, exchange.is_review] = exchange.end_s
    for attempt in robot.attempts:
        last[attempt.key] = attempt.end_s
    return [last.get(step.key) if step.state in ("done", "given_up") else None for step in robot.steps]


@dataclass(frozen=True, slots=True)
class Totals:
    """How many steps had been completed, given up and redone at a time, for all robots."""

    num_steps: int
    times: dict[str, NDArray[np.float64]]  # what -> when, sorted
    is_finished: bool = False  # every shift has been worked and reviewed

    @classmethod
    def of(cls, robots: dict[str, RobotIndex]) -> Totals:
        done, given_up, redone, num_steps = [], [], [], 0
        is_finished = bool(robots)
        for robot in robots.values():
            reviewed = {one.shift for one in robot.hours if one.is_review and one.end_s is not None}
            is_finished &= {step.shift for step in robot.steps} <= reviewed
            for step, end in zip(robot.steps, step_ends(robot), strict=True):
                num_steps += not step.is_review
                if end is None:
                    continue
                if step.is_review:
                    if step.state == "done":
                        redone.append(end)
                else:
                    (done if step.state == "done" else given_up).append(end)
        calls = [exchange.end_s for robot in robots.values() for exchange in robot.exchanges]
        attempts = [attempt.end_s for robot in robots.values() for attempt in robot.attempts]
        times = {"done": done, "given_up": given_up, "redone": redone, "attempts": attempts, "calls": calls}
        sorted_times = {name: np.sort(np.array(values)) for name, values in times.items()}
        return cls(num_steps, sorted_times, is_finished)

    def at(self, t: float) -> dict[str, int]:
        counts = {name: int(np.searchsorted(times, t, "right")) for name, times in self.times.items()}
        return {"steps": self.num_steps, **counts}
