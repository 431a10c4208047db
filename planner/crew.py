"""Who works on a shift: the planner, the robot, the rules between them, and the journal."""

from __future__ import annotations

import threading
from typing import Protocol

from dayshift.planner.clients.api import PlannerClient
from dayshift.planner.dialogue import Dialogue
from dayshift.planner.errors import OperationStoppedError
from dayshift.planner.jobs import Attempt, AttemptResult, AttemptStarted
from dayshift.planner.journal import Journal
from dayshift.planner.records import AttemptRecord
from dayshift.planner.rules import Rules, Situation, StepProgress
from dayshift.planner.store import Store
from dayshift.types import Outcome, Publish, RunClock


class RobotExecutor(Protocol):
    """Carries out attempts on one robot, one at a time."""

    def execute(self, attempt: Attempt) -> AttemptResult:
        """Try `attempt.instruction`; the outcome is DONE, FAILED or INFRA, as the simulator says.

        What breaks in the simulator is an INFRA result, not an exception. An attempt that was under
        way when a run was killed is executed again with the same attempt_id.
        """
        ...


class Crew:
    """Everything that the loops of one robot work with."""

    def __init__(
        self,
        robot: str,
        *,
        planner: PlannerClient,
        executor: RobotExecutor,
        store: Store,
        rules: Rules,
        clock: RunClock,
        publish: Publish,
        stop: threading.Event,
    ) -> None:
        self.robot = robot
        self.planner = planner
        self.rules = rules
        self.journal = Journal(robot, store, clock, publish)
        self.dialogue = Dialogue(planner, self.journal, rules, stop)
        self._executor = executor
        self._stop = stop

    def try_step(self, progress: StepProgress) -> None:
        """Try a step once; again, a bounded number of times, while simulator or server break."""
        while True:
            result = self._run(self._next_attempt(progress))
            progress.count(result)
            if result.outcome is not Outcome.INFRA or progress.situation is Situation.EXHAUSTED:
                return

    def _next_attempt(self, progress: StepProgress) -> Attempt:
        number = progress.num_attempts + 1
        phase = "r" if progress.is_review else "w"
        retry = f"i{progress.num_infra_attempts}" if progress.num_infra_attempts else ""
        return Attempt(
            attempt_id=f"{self.robot}-{progress.step.key}-{phase}{number}{retry}",
            robot=self.robot,
            step=progress.step,
            number=number,
            is_review=progress.is_review,
            instruction=progress.step.task,
        )

    def _run(self, attempt: Attempt) -> AttemptResult:
        if (recorded := self.journal.recorded_attempt(attempt)) is not None:
            return recorded.result
        if self._stop.is_set():
            raise OperationStoppedError(f"robot {self.robot}: stopped")
        clock = self.journal.clock
        start_s = clock.now()
        self.journal.publish(AttemptStarted(t=start_s, robot=self.robot, attempt=attempt))
        result = self._executor.execute(attempt)
        self.journal.add_attempt(
            AttemptRecord(attempt=attempt, result=result, start_s=start_s, end_s=clock.now())
        )
        return result
