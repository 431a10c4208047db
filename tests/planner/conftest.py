"""Small deterministic parts around the real loops: a robot with planned outcomes, a ticking clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from dayshift.engine.api import FinishReason, RecallRange, TokenLedger
from dayshift.planner.clients.api import PlannerClient, PlannerReply
from dayshift.planner.clients.scripted import ScriptedPlanner
from dayshift.planner.crew import Crew
from dayshift.planner.errors import PlannerCallError
from dayshift.planner.jobs import Attempt, AttemptResult, Job, JobStep, Shift
from dayshift.planner.operation import OperationReport, run_operation
from dayshift.planner.records import Exchange, RobotRecords
from dayshift.planner.rules import Rules
from dayshift.planner.store import InMemoryStore, Store
from dayshift.types import Event, Outcome, RunClock, StepKey

TASKS = ("open the drawer", "put the bowl on the stove", "turn on the stove")
RULES = Rules(max_attempts=2, max_infra_retries=1, planner_retry_delays_s=(0.0, 0.0))


def make_plan(num_shifts: int = 2, num_jobs: int = 2, num_steps: int = 2) -> tuple[Shift, ...]:
    """Sentences repeat within a shift, so that only keys tell steps apart."""
    return tuple(
        Shift(
            s,
            tuple(
                Job(
                    j,
                    tuple(
                        JobStep(StepKey(s, j, k), TASKS[(j * num_steps + k) % len(TASKS)])
                        for k in range(1, num_steps + 1)
                    ),
                )
                for j in range(1, num_jobs + 1)
            ),
        )
        for s in range(1, num_shifts + 1)
    )


class TickClock(RunClock):
    """Moves on by a second each time it is read."""

    def now(self) -> float:
        self.offset_s += 1.0
        return self.offset_s


class PlannedRobot:
    """Ends each attempt as planned for its attempt_id: an outcome, DONE where none is planned."""

    def __init__(self, outcomes: Mapping[str, Outcome] | Callable[[str], Outcome]) -> None:
        self._outcome_of = (
            outcomes if callable(outcomes) else lambda attempt_id: outcomes.get(attempt_id, Outcome.DONE)
        )
        self.executed: list[Attempt] = []

    def execute(self, attempt: Attempt) -> AttemptResult:
        self.executed.append(attempt)
        return AttemptResult(outcome=self._outcome_of(attempt.attempt_id), num_control_steps=7)


@dataclass
class FaultyPlanner:
    """The oracle, but for the n-th asked message (from 1): a faulty reply, or no reply at all."""

    replies: Mapping[int, str | PlannerReply | PlannerCallError] = field(default_factory=dict)
    remembers: bool = True
    messages: list[str] = field(default_factory=list)
    recall_ranges: list[RecallRange | None] = field(default_factory=list)
    history: tuple[Exchange, ...] = ()  # as it was opened with

    def __post_init__(self) -> None:
        self._oracle = ScriptedPlanner(remembers=self.remembers)

    def open(self, robot: str, history: Sequence[Exchange]) -> None:
        self.history = tuple(history)
        self._oracle.open(robot, history)

    def ask(
        self,
        message: str,
        *,
        at: float,
        schema: dict[str, Any],
        max_tokens: int,
        recall_range: RecallRange | None = None,
    ) -> PlannerReply:
        self.messages.append(message)
        self.recall_ranges.append(recall_range)
        planned = self.replies.get(len(self.messages))
        if isinstance(planned, PlannerCallError):
            raise planned
        reply = self._oracle.ask(message, at=at, schema=schema, max_tokens=max_tokens)
        match planned:
            case None:
                return reply
            case str(text):
                return PlannerReply(text=text, finish_reason=FinishReason.STOP)
            case _:
                return planned

    def close(self) -> None:
        self._oracle.close()


@dataclass
class Rig:
    """One robot's operation, with the parts a test wants to look at."""

    shifts: tuple[Shift, ...] = field(default_factory=make_plan)
    outcomes: Mapping[str, Outcome] | Callable[[str], Outcome] = field(default_factory=dict)
    planner: PlannerClient = field(default_factory=lambda: ScriptedPlanner(remembers=True))
    store: Store = field(default_factory=InMemoryStore)
    rules: Rules = RULES
    stop: threading.Event = field(default_factory=threading.Event)
    events: list[Event] = field(default_factory=list)
    name: str = "r0"

    def __post_init__(self) -> None:
        self.robot = PlannedRobot(self.outcomes)

    def crew(self) -> Crew:
        return Crew(
            self.name,
            planner=self.planner,
            executor=self.robot,
            store=self.store,
            rules=self.rules,
            clock=TickClock(offset_s=self.records.last_s),
            publish=self.events.append,
            stop=self.stop,
        )

    def run(self) -> OperationReport:
        return run_operation(self.shifts, self.crew())

    @property
    def records(self) -> RobotRecords:
        return self.store.load(self.name)

    def result(self, shift: int, job: int, step: int, *, is_review: bool = False) -> tuple[Any, ...]:
        """(state, reason, attempts, infra attempts) of a step."""
        [record] = [
            r
            for r in self.records.steps
            if r.step.key == StepKey(shift, job, step) and r.is_review == is_review
        ]
        return record.state, record.reason, record.num_attempts, record.num_infra_attempts


@pytest.fixture(scope="session")
def rig() -> type[Rig]:
    return Rig


@pytest.fixture(scope="session")
def faulty_planner() -> type[FaultyPlanner]:
    return FaultyPlanner


@pytest.fixture(scope="session")
def plan() -> Callable[..., tuple[Shift, ...]]:
    return make_plan


@pytest.fixture(scope="session")
def cut_off() -> PlannerReply:
    return PlannerReply(
        text='{"action":"exe', finish_reason=FinishReason.LENGTH, ledger=TokenLedger(computed=9)
    )
