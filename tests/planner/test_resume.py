"""Killed at any durable point, a run resumes without repeating a finished step or an exchange."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine.api import FinishReason
from dayshift.planner.clients.api import PlannerReply
from dayshift.planner.errors import PlannerCallError
from dayshift.planner.store import InMemoryStore
from dayshift.types import Outcome

D, F, I = Outcome.DONE, Outcome.FAILED, Outcome.INFRA  # noqa: E741

# Something of everything: retries, infra, steps given up for each reason, redo done and given up again.
OUTCOMES = {
    "r0-1.1.1-w1": F,
    "r0-1.1.2-w1": F,
    "r0-1.1.2-w2": F,
    "r0-1.2.1-w1": I,
    "r0-1.2.2-w1": I,
    "r0-1.2.2-w1i1": I,
    "r0-2.1.1-w1": F,
    "r0-2.1.1-w2": F,
    "r0-2.1.1-r1": F,
    "r0-2.1.1-r2": F,
}
CUT_OFF = PlannerReply(text='{"action":', finish_reason=FinishReason.LENGTH)
DOWN = PlannerCallError("down", is_transient=False)
# By message: these replies are the same in every process, as a greedy model's are.
FAULTS = {
    "Shift 2, job 1, step 2: ": CUT_OFF,
    "Shift 2, job 2, step 1: ": DOWN,
    "Shift 2, job 2, step 2: ": '{"action":"next"}',
    "That reply cannot be used: the step has not": CUT_OFF,
}


class KilledError(BaseException):
    """Stands for the process's death: nothing may catch it."""


class KillingStore(InMemoryStore):
    """Dies at the n-th commit (from 1), right before it is durable or right after."""

    def __init__(self) -> None:
        super().__init__()
        self.kill_at: int | None = None
        self.is_kept = True
        self.num_commits = 0

    def _commit(self, write, *args) -> None:
        self.num_commits += 1
        is_last = self.num_commits == self.kill_at
        if not is_last or self.is_kept:
            write(*args)
        if is_last:
            raise KilledError

    def save_plan(self, robot, shifts):
        self._commit(super().save_plan, robot, shifts)

    def save_step(self, record):
        self._commit(super().save_step, record)

    def save_hours(self, hours):
        self._commit(super().save_hours, hours)

    def add_exchange(self, exchange):
        self._commit(super().add_exchange, exchange)

    def add_attempt(self, record):
        self._commit(super().add_attempt, record)

    def save_answer(self, robot, answer):
        self._commit(super().save_answer, robot, answer)


@pytest.fixture(scope="module")
def operation(rig, faulty_planner):
    """Makes an operation on a killing store; a new process is a new planner on the same store."""

    class PlannerByMessage(faulty_planner):
        def ask(self, message, **question):
            reply = next((r for start, r in FAULTS.items() if message.startswith(start)), None)
            self.replies = {len(self.messages) + 1: reply} if reply else {}
            return super().ask(message, **question)

    def make(store=None, robot=None):
        r = rig(outcomes=OUTCOMES, store=store or KillingStore(), planner=PlannerByMessage())
        r.robot = robot or r.robot
        return r

    return make


def without_times(records):
    """What must be the same in a killed and an uninterrupted run."""
    return (
        [(e.index, e.message, e.reply, e.problem, e.error, e.shift, e.step) for e in records.exchanges],
        [(a.attempt, a.result) for a in records.attempts],
        sorted(records.steps, key=lambda s: (s.is_review, s.step.key)),
        records.answers,
        [(h.shift, h.is_review, h.end_s is not None) for h in records.hours],
    )


@pytest.fixture(scope="module")
def uninterrupted(operation):
    r = operation()
    report = r.run()
    return r, report


def run_killed(operation, kills):
    """Run until each of the kills (commits of that process, is_kept), then to the end."""
    store = KillingStore()
    robot = None
    planners = []
    for kill_at, is_kept in [*kills, (None, True)]:
        r = operation(store, robot)
        robot = r.robot
        planners.append(r.planner)
        store.num_commits, store.kill_at, store.is_kept = 0, kill_at, is_kept
        try:
            report = r.run()
        except KilledError:
            continue
        return r, report, planners
    raise AssertionError("the last process was killed")


def check(killed, uninterrupted, kills):
    r, report, planners = killed
    whole, whole_report = uninterrupted
    assert without_times(r.records) == without_times(whole.records)
    assert [s.results for s in report.shifts] == [s.results for s in whole_report.shifts]
    assert report.reviews == whole_report.reviews
    # Only an attempt or exchange whose commit was lost is repeated.
    num_lost = sum(not is_kept for _, is_kept in kills)
    runs = Counter(attempt.attempt_id for attempt in r.robot.executed)
    assert set(runs) == {attempt.attempt_id for attempt in whole.robot.executed}
    num_asked = sum(len(planner.messages) for planner in planners)
    repeated = runs.total() - len(runs) + num_asked - len(whole.planner.messages)
    assert repeated <= num_lost


def num_commits(uninterrupted):
    return uninterrupted[0].store.num_commits


@pytest.mark.parametrize("is_kept", [True, False])
def test_killed_at_every_commit(operation, uninterrupted, is_kept):
    assert num_commits(uninterrupted) > 60
    for kill_at in range(1, num_commits(uninterrupted) + 1):
        kills = [(kill_at, is_kept)]
        check(run_killed(operation, kills), uninterrupted, kills)


@settings(max_examples=40, deadline=None)
@given(kills=st.lists(st.tuples(st.integers(1, 25), st.booleans()), max_size=8))
def test_killed_again_and_again(operation, uninterrupted, kills):
    check(run_killed(operation, kills), uninterrupted, kills)


def test_the_operation_holds_something_of_everything(uninterrupted):
    r, report = uninterrupted
    reasons = {(s.state, s.reason, s.is_review) for s in r.records.steps}
    assert reasons == {
        ("done", None, False),
        ("done", None, True),
        ("given_up", "attempts", False),
        ("given_up", "attempts", True),
        ("given_up", "infra", False),
        ("given_up", "planner", False),
    }
    assert [[str(k) for k in answer.steps] for answer in report.reviews] == [["1.1.2", "1.2.2"], ["2.1.1"]]


def test_a_finished_operation_is_only_read(operation, uninterrupted):
    r, report = uninterrupted
    commits, attempts = r.store.num_commits, len(r.robot.executed)
    again = operation(r.store, r.robot)
    assert again.run() == report
    assert (again.planner.messages, again.events) == ([], [])
    assert (r.store.num_commits, len(r.robot.executed)) == (commits, attempts)


def test_flipped_records_do_not_change_what_the_planner_is_asked(operation, uninterrupted):
    """Kill right before the first review, flip every recorded outcome, go on: same messages."""
    whole, _ = uninterrupted
    first_review = next(e for e in whole.records.exchanges if e.is_review)
    num_before = first_review.index - 1
    num_failures = sum(bool(e.error) for e in whole.records.exchanges[:num_before])
    asked = {}
    for is_flipped in (False, True):
        store = KillingStore()
        r = operation(store)
        store.kill_at = commits_before_reviews(operation)
        with pytest.raises(KilledError):
            r.run()
        assert len(r.records.exchanges) == num_before
        if is_flipped:
            flip_outcomes(store)
        store.kill_at = None
        resumed = operation(store)
        resumed.run()
        asked[is_flipped] = resumed.planner.messages, resumed.planner.recall_ranges
    assert asked[True] == asked[False]
    assert asked[True][0] == whole.planner.messages[num_before:]
    assert num_failures == 1


def commits_before_reviews(operation):
    """The commit that ends the last shift."""
    store = KillingStore()
    ends = []
    save_hours = store.save_hours

    def watch(hours):
        save_hours(hours)
        if hours.end_s is not None and not hours.is_review:
            ends.append(store.num_commits)

    store.save_hours = watch
    operation(store).run()
    return ends[-1]


def flip_outcomes(store):
    records = store.load("r0")
    flipped = {D: F, F: D, I: D}
    for a in records.attempts:
        store.add_attempt(replace(a, result=replace(a.result, outcome=flipped[a.result.outcome])))
    for s in records.steps:
        state = "given_up" if s.state == "done" else "done"
        store.save_step(replace(s, state=type(s.state)(state), reason=None))
