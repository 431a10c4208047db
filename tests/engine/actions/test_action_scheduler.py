"""Who goes first, who waits, who is refused; and that the LLM gets its steps in between."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import pytest

from dayshift.engine.action_api import (
    ActionChunk,
    ActionRequest,
    Actions,
    DeadlineExceededError,
    PolicyInfo,
    PolicyNotFoundError,
)
from dayshift.engine.action_scheduler import GATHER_S, LAUNCH_S, ActionResult, ActionScheduler
from dayshift.engine.api import EngineError, InvalidRequestError
from dayshift.engine.servable import Progress

SLICE_S = 0.010


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class EchoPolicy:
    """Answers with the robot's state, in three slices of 10 ms; 13 is a state that breaks it.

    With `is_asynchronous` slices are only launched, as on a GPU, and waited for at the end.
    """

    clock: Clock
    name: str = "echo"
    max_batch_size: int = 4
    group_size: int | None = None
    slice_durations: tuple[float, ...] = (SLICE_S,) * 3
    is_asynchronous: bool = False
    batches: list[list[float]] = field(default_factory=list)

    @property
    def info(self) -> PolicyInfo:
        return PolicyInfo(
            name=self.name, kind="echo", cameras=(), state_dim=1, action_dim=1, chunk_size=1, n_action_steps=1
        )

    def prepare(self, request: ActionRequest) -> float:
        if len(request.state) != 1:
            raise InvalidRequestError("one number is wanted")
        return request.state[0]

    def slice_s(self, batch_size: int) -> tuple[float, ...]:
        return self.slice_durations

    def infer(self, batch: Sequence[float]) -> Generator[Progress, Sequence[float] | None, list[Actions]]:
        self.batches.append(list(batch))
        *first, last = self.slice_durations
        for duration in first:
            self.clock.now_s += 0.0 if self.is_asynchronous else duration
            yield Progress.SLICE_DONE
        self.clock.now_s += last
        if 13.0 in batch:
            raise ZeroDivisionError
        return [((state,),) for state in batch]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def policy(clock: Clock) -> EchoPolicy:
    return EchoPolicy(clock)


@pytest.fixture
def scheduler(clock: Clock, policy: EchoPolicy) -> ActionScheduler:
    return ActionScheduler({"echo": policy}, now=clock)


def request(state: float, deadline: float | None = None, policy: str = "echo") -> ActionRequest:
    return ActionRequest(policy=policy, images={}, state=(state,), instruction="go", deadline=deadline)


def run(scheduler: ActionScheduler, clock: Clock) -> list[ActionResult]:
    """Step until nothing waits or runs."""
    results: list[ActionResult] = []
    while scheduler.has_work:
        clock.now_s += scheduler.idle_s() or 0.0
        results += scheduler.step()
    return results


def test_requests_are_gathered_and_answered_together(
    scheduler: ActionScheduler, clock: Clock, policy: EchoPolicy
):
    scheduler.submit(1, request(1.0))
    assert list(scheduler.step()) == []  # another robot may be about to ask
    clock.now_s += GATHER_S / 2
    scheduler.submit(2, request(2.0))
    assert scheduler.idle_s() == pytest.approx(GATHER_S / 2)
    results = dict(run(scheduler, clock))
    assert policy.batches == [[1.0, 2.0]]
    chunks = [results[1], results[2]]
    assert all(isinstance(chunk, ActionChunk) and chunk.batch_size == 2 for chunk in chunks)
    first = chunks[0]
    assert isinstance(first, ActionChunk)
    assert first.actions == ((1.0,),)
    assert first.queued_ms == pytest.approx(1000 * GATHER_S)
    assert first.infer_ms == pytest.approx(1000 * 3 * SLICE_S)


def test_a_full_batch_does_not_wait(scheduler: ActionScheduler, policy: EchoPolicy):
    for call_id in range(policy.max_batch_size):
        scheduler.submit(call_id, request(float(call_id)))
    assert scheduler.idle_s() == 0.0
    assert list(scheduler.step()) == []
    assert len(policy.batches) == 1


def test_the_earliest_deadline_goes_first(scheduler: ActionScheduler, clock: Clock, policy: EchoPolicy):
    for call_id, deadline in enumerate([None, 105.0, 101.0, None, 103.0, 102.0]):
        scheduler.submit(call_id, request(float(call_id), deadline))
    run(scheduler, clock)
    assert policy.batches == [[2.0, 5.0, 4.0, 1.0], [0.0, 3.0]]


def test_policies_share_one_queue(clock: Clock):
    first, second = EchoPolicy(clock), EchoPolicy(clock, name="second")
    scheduler = ActionScheduler({"echo": first, "second": second}, now=clock)
    scheduler.submit(1, request(1.0, deadline=109.0))
    scheduler.submit(2, request(2.0, deadline=101.0, policy="second"))
    scheduler.submit(3, request(3.0, deadline=102.0))
    results = dict(run(scheduler, clock))
    assert len(results) == 3
    assert second.batches == [[2.0]]
    assert first.batches == [[3.0, 1.0]]


def test_what_is_late_before_it_begins_is_refused(
    scheduler: ActionScheduler, clock: Clock, policy: EchoPolicy
):
    scheduler.submit(1, request(1.0, deadline=99.9))
    scheduler.submit(2, request(2.0))
    results = dict(run(scheduler, clock))
    assert isinstance(results[1], DeadlineExceededError)
    assert isinstance(results[2], ActionChunk)
    assert policy.batches == [[2.0]]
    assert scheduler.stats.num_action_deadlines_missed == 1


def test_malformed_and_unknown_are_refused_alone(scheduler: ActionScheduler, clock: Clock):
    scheduler.submit(1, request(1.0))
    with pytest.raises(InvalidRequestError, match="one number"):
        scheduler.submit(2, ActionRequest(policy="echo", images={}, state=(), instruction="go"))
    with pytest.raises(PolicyNotFoundError, match="served: echo"):
        scheduler.submit(3, request(1.0, policy="nobody"))
    assert [call_id for call_id, _ in run(scheduler, clock)] == [1]


def test_actions_that_are_not_finite_fail_alone(scheduler: ActionScheduler, clock: Clock):
    scheduler.submit(1, request(float("nan")))
    scheduler.submit(2, request(2.0))
    results = dict(run(scheduler, clock))
    assert isinstance(results[1], EngineError)
    assert isinstance(results[2], ActionChunk)


def test_a_failed_batch_is_answered_and_the_next_one_runs(scheduler: ActionScheduler, clock: Clock):
    scheduler.submit(1, request(13.0))
    assert isinstance(dict(run(scheduler, clock))[1], EngineError)
    scheduler.submit(2, request(2.0))
    assert isinstance(dict(run(scheduler, clock))[2], ActionChunk)


def test_a_cancelled_request_is_not_computed(scheduler: ActionScheduler, clock: Clock, policy: EchoPolicy):
    scheduler.submit(1, request(1.0))
    scheduler.cancel(1)
    assert not scheduler.has_work
    assert scheduler.idle_s() is None
    assert policy.batches == []


def test_tokens_are_decoded_between_slices_unless_the_deadline_is_near(
    scheduler: ActionScheduler, clock: Clock, policy: EchoPolicy
):
    for _ in range(100):
        scheduler.on_engine_step(0.020)
    for call_id in range(policy.max_batch_size):
        scheduler.submit(call_id, request(1.0, deadline=clock.now_s + 0.065))
    assert scheduler.leaves_time_for_tokens()
    list(scheduler.step())  # 55 ms left, 2 slices of 10 ms to go
    assert scheduler.leaves_time_for_tokens()
    clock.now_s += 0.020  # an engine step
    assert not scheduler.leaves_time_for_tokens()  # 35 ms left, 20 ms of slices, 20 ms of an engine step
    list(scheduler.step())
    list(scheduler.step())
    assert scheduler.leaves_time_for_tokens()  # between two inferences always
    assert scheduler.stats.num_action_deadlines_missed == 0


def test_a_robot_that_has_been_alone_is_not_kept_waiting(clock: Clock):
    """Of three that ask together, the first waits for the others; when they have gone, soon no more."""
    policy = EchoPolicy(clock, max_batch_size=8, slice_durations=(0.01,))
    scheduler = ActionScheduler({"echo": policy}, now=clock)
    waits: list[float] = []
    for call_ids in ([1], [2], [3, 4, 5], [6, 7, 8], [9], [10], [11]):
        scheduler.submit(call_ids[0], request(1.0))
        wait_s = scheduler.idle_s()
        assert wait_s is not None
        waits.append(wait_s)
        for call_id in call_ids[1:]:
            scheduler.submit(call_id, request(1.0))
        clock.now_s += scheduler.idle_s() or 0.0
        assert sorted(call_id for call_id, _ in scheduler.step()) == call_ids
    assert waits == pytest.approx([GATHER_S, 0.0, 0.0, GATHER_S, GATHER_S, GATHER_S, 0.0])


def test_robots_that_got_out_of_step_meet_again(clock: Clock):
    """The one that asked while the other's chunk was computed waits a moment, because that one asks again."""
    policy = EchoPolicy(clock, max_batch_size=8, slice_durations=(0.01, 0.01))
    scheduler = ActionScheduler({"echo": policy}, burst_s=0.0, now=clock)
    for call_id in (1, 2):  # alone
        scheduler.submit(call_id, request(1.0))
        clock.now_s += scheduler.idle_s() or 0.0
        while not list(scheduler.step()):
            pass
    scheduler.submit(3, request(1.0))
    assert list(scheduler.step()) == []
    scheduler.submit(4, request(2.0))  # while 3 is computed
    assert [call_id for call_id, _ in scheduler.step()] == [3]
    assert scheduler.idle_s() == pytest.approx(GATHER_S)
    clock.now_s += GATHER_S / 2
    assert list(scheduler.step()) == []
    scheduler.submit(5, request(1.0))
    assert scheduler.idle_s() == 0.0
    assert list(scheduler.step()) == []
    assert sorted(call_id for call_id, _ in scheduler.step()) == [4, 5]


def test_short_slices_run_in_bursts(clock: Clock):
    policy = EchoPolicy(clock, max_batch_size=1, slice_durations=(0.003, 0.002, 0.002, 0.004, 0.009))
    scheduler = ActionScheduler({"echo": policy}, burst_s=0.006, now=clock)
    scheduler.submit(1, request(1.0))
    num_slices, results = [], []
    while scheduler.has_work:
        results = list(scheduler.step())
        num_slices.append(scheduler.stats.num_action_slices)
    assert num_slices == [2, 4, 5]  # the LLM waits 5, 6 and, for a slice that cannot be cut, 9 ms
    assert [call_id for call_id, _ in results] == [1]


def test_slices_that_the_device_has_still_to_do_are_no_part_of_an_engine_step(clock: Clock):
    policy = EchoPolicy(clock, max_batch_size=1, slice_durations=(0.010, 0.010), is_asynchronous=True)
    scheduler = ActionScheduler({"echo": policy}, now=clock)
    for _ in range(100):
        scheduler.on_engine_step(0.005)
    scheduler.submit(1, request(1.0, deadline=clock.now_s + 0.0349))
    list(
        scheduler.step()
    )  # launched: it takes as long as the step that is left, with 5 ms for the LLM between
    assert scheduler.leaves_time_for_tokens()
    clock.now_s += 0.015  # the engine's step has waited for the slice
    scheduler.on_engine_step(0.015)
    assert scheduler.leaves_time_for_tokens()  # 19.9 ms for a slice and another step
    clock.now_s += 0.005
    assert not scheduler.leaves_time_for_tokens()


@dataclass
class GrowingPolicy(EchoPolicy):
    """Two robots are a slice of their own, which the device needs 10 ms for; two more slices follow."""

    max_batch_size: int = 6
    group_size: int | None = 2

    def slice_s(self, batch_size: int) -> tuple[float, ...]:
        return (SLICE_S,) * (-(-batch_size // 2) + 2)

    def infer(self, batch: Sequence[float]) -> Generator[Progress, Sequence[float] | None, list[Actions]]:
        members, waiting = list[float](), list(batch)
        while waiting:
            group, waiting = waiting[:2], waiting[2:]
            members += group
            may_grow = not waiting and len(members) < self.max_batch_size
            waiting += (yield Progress.OPEN if may_grow else Progress.SLICE_DONE) or ()
        self.batches.append(members)
        yield Progress.SLICE_DONE
        self.clock.now_s += (len(members) // 2 + 2) * SLICE_S
        return [((state,),) for state in members]


@pytest.fixture
def growing(clock: Clock) -> GrowingPolicy:
    return GrowingPolicy(clock)


@pytest.fixture
def busy(clock: Clock, growing: GrowingPolicy) -> ActionScheduler:
    """Six robots are expected, two are there, and the device works on them."""
    scheduler = ActionScheduler({"echo": growing}, now=clock)
    scheduler.submit(0, request(0.0))
    assert scheduler.idle_s() == pytest.approx(GATHER_S)
    scheduler.submit(1, request(1.0))
    assert scheduler.idle_s() == 0.0
    assert list(scheduler.step()) == []
    return scheduler


def test_robots_join_while_the_device_works_on_the_first(
    busy: ActionScheduler, growing: GrowingPolicy, clock: Clock
):
    assert busy.idle_s() == pytest.approx(SLICE_S - LAUNCH_S)
    assert busy.leaves_time_for_tokens()
    clock.now_s += 0.001
    busy.submit(2, request(2.0))
    assert busy.idle_s() == pytest.approx(SLICE_S - LAUNCH_S - 0.001)  # for one alone it is too soon
    assert list(busy.step()) == []
    busy.submit(3, request(3.0))
    assert busy.idle_s() == 0.0
    list(busy.step())
    assert busy.idle_s() == pytest.approx(2 * SLICE_S - LAUNCH_S - 0.001)
    for call_id in (4, 5):
        busy.submit(call_id, request(float(call_id)))
    results = dict(run(busy, clock))
    assert growing.batches == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]
    last = results[5]
    assert isinstance(last, ActionChunk)
    assert last.actions == ((5.0,),)
    assert last.batch_size == 6
    assert last.queued_ms == pytest.approx(0.0)
    assert last.infer_ms == pytest.approx(1000 * 5 * SLICE_S)
    assert busy.stats.num_action_batches == 1


def test_a_batch_goes_on_before_the_device_idles(busy: ActionScheduler, growing: GrowingPolicy, clock: Clock):
    """With whoever is there, and without those who are late already or want something else."""
    busy.policies = {**busy.policies, "other": EchoPolicy(clock, name="other")}
    busy.submit(2, request(2.0))
    busy.submit(3, request(3.0, deadline=clock.now_s + 0.001))
    busy.submit(4, request(4.0, policy="other"))
    busy.cancel(2)
    busy.submit(5, request(5.0))
    clock.now_s += SLICE_S - LAUNCH_S + 1e-6
    assert busy.idle_s() == 0.0
    results = dict(run(busy, clock))
    assert growing.batches == [[0.0, 1.0, 5.0]]
    assert isinstance(results[3], DeadlineExceededError)
    assert isinstance(results[4], ActionChunk)


def test_the_device_is_not_left_waiting_for_messages(clock: Clock, growing: GrowingPolicy):
    """Whoever reads messages stops as soon as there is enough to begin with, and before the device idles."""
    scheduler = ActionScheduler({"echo": growing}, now=clock)
    assert not scheduler.is_awaited
    scheduler.submit(0, request(0.0))
    assert not scheduler.is_awaited
    scheduler.submit(1, request(1.0))
    assert scheduler.is_awaited
    list(scheduler.step())
    for call_id in range(2, 6):
        scheduler.submit(call_id, request(float(call_id)))
        assert not scheduler.is_awaited  # the device works on the first two
    clock.now_s += SLICE_S - LAUNCH_S + 1e-6
    assert scheduler.is_awaited


def test_a_batch_that_nobody_joins_goes_on(busy: ActionScheduler, growing: GrowingPolicy, clock: Clock):
    assert sorted(dict(run(busy, clock))) == [0, 1]
    assert growing.batches == [[0.0, 1.0]]


def test_the_urgent_join_first(busy: ActionScheduler, growing: GrowingPolicy, clock: Clock):
    for call_id, deadline in enumerate([None, 105.0, 101.0, None, 103.0], start=2):
        busy.submit(call_id, request(float(call_id), deadline))
    run(busy, clock)
    assert growing.batches == [[0.0, 1.0, 4.0, 6.0, 3.0, 2.0], [5.0]]


@dataclass
class LaunchedPolicy(GrowingPolicy):
    """Says when all is launched; the end is waited for after that."""

    log: list[str] = field(default_factory=list)

    @property
    def is_launched(self) -> bool:
        return bool(self.log) and self.log[-1].startswith("launched")

    def infer(self, batch: Sequence[float]) -> Generator[Progress, Sequence[float] | None, list[Actions]]:
        self.log.append(f"begin {len(batch)}")
        for _ in self.slice_s(len(batch)):
            yield Progress.SLICE_DONE
        self.log.append(f"launched {len(batch)}")
        yield Progress.ON_ITS_WAY
        self.log.append(f"end {len(batch)}")
        return [((state,),) for state in batch]


@pytest.mark.parametrize(
    ("num_first", "num_waiting", "is_begun"),
    [(4, 0, False), (4, 1, False), (4, 2, True), (4, 6, True), (6, 0, False), (6, 1, True)],
)
def test_the_next_batch_begins_before_the_end_is_waited_for(
    clock: Clock, num_first: int, num_waiting: int, is_begun: bool
):
    """If there are enough for a group, or the batch was full; a few had better meet those answered now."""
    policy = LaunchedPolicy(clock)
    scheduler = ActionScheduler({"echo": policy}, now=clock)
    first, later = range(num_first), range(num_first, num_first + num_waiting)
    for call_id in first:
        scheduler.submit(call_id, request(0.0))
    while not policy.is_launched:
        assert list(scheduler.step()) == []
    for call_id in later:
        scheduler.submit(call_id, request(1.0))
    until_end_s = len(policy.slice_s(num_first)) * SLICE_S - LAUNCH_S
    assert scheduler.idle_s() == pytest.approx(until_end_s)  # time to read more messages
    assert list(scheduler.step()) == []
    clock.now_s += until_end_s + 1e-6
    results = list(scheduler.step())
    assert sorted(call_id for call_id, _ in results) == list(first)
    begun = [f"begin {num_waiting}"] if is_begun else []
    assert policy.log == [f"begin {num_first}", f"launched {num_first}", *begun, f"end {num_first}"]
    assert sorted(call_id for call_id, _ in run(scheduler, clock)) == list(later)


class BesidePolicy(EchoPolicy):
    """Is launched whole, and done 30 ms later, whatever the core does meanwhile."""

    def slice_s(self, batch_size: int) -> tuple[float, ...]:
        return ()

    def infer(self, batch: Sequence[float]) -> Generator[Progress, Sequence[float] | None, list[Actions]]:
        done_at = self.clock.now_s + 0.030
        while self.clock.now_s < done_at:
            yield Progress.ON_ITS_WAY
        return [((state,),) for state in batch]


def test_tokens_are_decoded_beside_an_inference_on_its_own_stream(clock: Clock):
    scheduler = ActionScheduler({"echo": BesidePolicy(clock, max_batch_size=1)}, now=clock)
    for _ in range(100):
        scheduler.on_engine_step(0.012)
    scheduler.submit(1, request(1.0, deadline=clock.now_s + 0.031))
    num_engine_steps, results = 0, list(scheduler.step())
    while not results:
        if scheduler.leaves_time_for_tokens():
            num_engine_steps += 1
            clock.now_s += 0.012
            scheduler.on_engine_step(0.012)
        else:
            clock.now_s += 0.001  # the end is looked for, and nothing else begun
        results = list(scheduler.step())
    assert num_engine_steps == 2
    assert scheduler.stats.num_action_deadlines_missed == 0
