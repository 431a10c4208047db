"""Batches of action requests, run slice by slice beside the LLM's steps, on one clock.

    waiting ──► gathered for a few ms, earliest deadline first ──► one inference at a time ──► chunks
                                                                        │ a burst of slices per `step`

A robot that moves waits for its actions, so slices go before planner tokens. Between two bursts the LLM
may do a step, unless the batch would then miss its earliest deadline; between two inferences it always may.
A burst is as many slices as keep the LLM waiting for no more than a few ms, at least one: fewer bursts end
the chunk sooner and delay fewer tokens. When all is launched the LLM may do a step before the end is waited
for, so that the device has something to do then. An inference that runs beside is launched whole.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from dayshift.engine.action_api import (
    ActionChunk,
    ActionRequest,
    Actions,
    DeadlineExceededError,
    PolicyInfo,
    PolicyNotFoundError,
)
from dayshift.engine.api import EngineError, EngineOverloadedError
from dayshift.engine.servable import Progress, Servable

logger = logging.getLogger(__name__)

GATHER_S = 0.003
BURST_S = 0.006
MAX_WAITING = 1024
LAUNCH_S = 0.002  # so long before the device has nothing left to do a batch that could grow goes on
_SMOOTHING = 0.2  # weight of the newest duration in a running mean

ActionResult = tuple[int, ActionChunk | EngineError]  # call id, answer


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """A checked request in the queue."""

    call_id: int
    policy: str
    prepared: Any
    arrived_at: float
    deadline: float
    begun_at: float = math.inf

    @property
    def urgency(self) -> tuple[float, float]:
        return self.deadline, self.arrived_at


@dataclass(slots=True, kw_only=True)
class _Inference:
    """The batch that is being computed."""

    members: list[_Waiting]
    slices: Generator[Progress, Sequence[Any] | None, Iterable[Actions]]
    left_s: Sequence[float]  # what each of the slices that have not begun will take
    started_at: float
    num_expected: int  # members, before it has to wait for nobody
    launched_s: float = 0.0  # what the slices so far take
    progress: Progress = Progress.SLICE_DONE
    joining: Sequence[Any] | None = None  # to be sent to `slices`

    @property
    def is_open(self) -> bool:
        """Others may join."""
        return self.progress is Progress.OPEN

    @property
    def is_on_its_way(self) -> bool:
        """Nothing is left to launch."""
        return self.progress is Progress.ON_ITS_WAY

    @property
    def busy_until(self) -> float:
        """When the device has done what was launched, at the earliest."""
        return self.started_at + self.launched_s

    @property
    def deadline(self) -> float:
        return min(member.deadline for member in self.members)

    @property
    def next_s(self) -> float:
        """What the next slice will take."""
        return sum(self.left_s[:1])


@dataclass(slots=True)
class ActionStats:
    """Counters since the start."""

    num_action_chunks: int = 0
    num_action_batches: int = 0
    num_action_slices: int = 0
    num_action_errors: int = 0
    num_action_deadlines_missed: int = 0  # chunks that were finished late, or refused for being late


@dataclass(slots=True)
class ActionScheduler:
    """All policies of one engine core. Not thread-safe: the core's thread drives it."""

    policies: Mapping[str, Servable]
    gather_s: float = GATHER_S
    burst_s: float = BURST_S
    now: Callable[[], float] = time.monotonic
    stats: ActionStats = field(default_factory=ActionStats)
    _waiting: list[_Waiting] = field(default_factory=list)
    _running: _Inference | None = None
    _free_at: float = 0.0  # when the last inference ended
    _peaks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each policy, the most calls at once: until its last batch began, and since then."""
    _ahead_s: float = 0.0  # what the device has still to do of slices, when the next engine step begins
    _engine_step_s: float = 0.0

    @property
    def infos(self) -> tuple[PolicyInfo, ...]:
        """The served policies."""
        return tuple(policy.info for policy in self.policies.values())

    @property
    def has_work(self) -> bool:
        """Requests wait or run."""
        return bool(self._waiting or self._running)

    def submit(self, call_id: int, request: ActionRequest) -> None:
        """Queue a request; `step` returns its answer.

        Raises PolicyNotFoundError, EngineOverloadedError, and InvalidRequestError for a malformed one.
        """
        policy = self.policies.get(request.policy)
        if policy is None:
            served = ", ".join(self.policies) or "none"
            raise PolicyNotFoundError(f"policy {request.policy!r} is not served here; served: {served}")
        if len(self._waiting) >= MAX_WAITING:
            raise EngineOverloadedError(f"{MAX_WAITING} action requests are waiting already; try later")
        self._waiting.append(
            _Waiting(
                call_id=call_id,
                policy=request.policy,
                prepared=policy.prepare(request),
                arrived_at=self.now(),
                deadline=math.inf if request.deadline is None else request.deadline,
            )
        )
        before, since = self._peaks.get(request.policy, (policy.max_batch_size, 0))
        self._peaks[request.policy] = before, max(since, self._num_calls(request.policy))

    def cancel(self, call_id: int) -> None:
        """Drop a request that still waits; one that runs is finished with its batch."""
        self._waiting = [waiting for waiting in self._waiting if waiting.call_id != call_id]

    def idle_s(self) -> float | None:
        """How long there is nothing to do for `step`: 0 when a slice is due, None without requests."""
        running = self._running
        if running is not None and running.is_on_its_way:
            return max(0.0, running.busy_until - LAUNCH_S - self.now())
        if running is not None and not running.is_open:
            return 0.0
        if running is None and not self._waiting:
            return None
        _, wait_s = self._next_members()
        return wait_s

    @property
    def is_awaited(self) -> bool:
        """Without `step` the device has nothing to do, or soon will, although there is enough."""
        running = self._running
        if running is not None:
            return self.now() >= running.busy_until - LAUNCH_S and self.idle_s() == 0.0
        members = self._most_urgent()
        group_size = self.policies[members[0].policy].group_size if members else None
        return group_size is not None and len(members) >= group_size

    def step(self) -> Iterable[ActionResult]:
        """Run a burst of slices if any is due; the answers that are ready, to be taken at once: each is made
        when it is taken, so that the first is on its way before the last is made."""
        if self.idle_s() != 0.0:
            return []
        if self._running is not None and self._running.is_on_its_way:
            return self._end(self._running)
        late: list[ActionResult] = []
        if self._running is None:
            late = self._refuse_late()
            if not self._waiting:
                return late
            members, _ = self._next_members()
            self._begin(members)
        return chain(late, self._run_burst())

    def leaves_time_for_tokens(self) -> bool:
        """Whether the LLM may do a step now without making a running batch late."""
        running = self._running
        if running is None:
            return True
        needed_s = self._ahead_s + sum(running.left_s) + self._engine_step_s
        return self.now() + needed_s <= running.deadline

    def on_engine_step(self, seconds: float) -> None:
        """The LLM did a step; it took this long, with what the device had still to do of slices before."""
        own_s = max(0.0, seconds - self._ahead_s)
        self._ahead_s = 0.0
        self._engine_step_s += _SMOOTHING * (own_s - self._engine_step_s)

    def _num_calls(self, policy: str) -> int:
        """Calls of a policy that wait or run."""
        running = [] if self._running is None else self._running.members
        return sum(call.policy == policy for call in (*self._waiting, *running))

    def _most_expected(self, policy: str) -> int:
        """So many calls make a batch for which nobody has to wait longer."""
        return min(self.policies[policy].max_batch_size, max(self._peaks[policy]))

    def _next_members(self) -> tuple[list[_Waiting], float]:
        """Who begins a batch next, or joins the open one, the most urgent first; and in how many seconds.

        At once if they are as many as are expected, or groups with which the device has enough to do until
        the others are there.
        """
        running, by_urgency = self._running, sorted(self._waiting, key=lambda waiting: waiting.urgency)
        begun = [] if running is None else running.members
        name = (begun or by_urgency)[0].policy
        policy = self.policies[name]
        fitting = [waiting for waiting in by_urgency if waiting.policy == name]
        if running is not None:
            fitting = [waiting for waiting in fitting if waiting.deadline >= self.now()]
        fitting = fitting[: policy.max_batch_size - len(begun)]
        # A robot that has been alone need not wait; several that got out of step meet again.
        num_expected = self._most_expected(name) if running is None else running.num_expected
        if len(begun) + len(fitting) >= num_expected:
            return fitting, 0.0
        if running is not None:
            due_at = running.busy_until - LAUNCH_S
        else:
            gathered_at = max(self._free_at, min(waiting.arrived_at for waiting in fitting)) + self.gather_s
            due_at = min(gathered_at, fitting[0].deadline)
        wait_s = max(0.0, due_at - self.now())
        if policy.group_size and len(fitting) >= policy.group_size:
            return fitting[: len(fitting) // policy.group_size * policy.group_size], 0.0
        return fitting, wait_s

    def _refuse_late(self) -> list[ActionResult]:
        now = self.now()
        late = [waiting for waiting in self._waiting if waiting.deadline < now]
        self._waiting = [waiting for waiting in self._waiting if waiting.deadline >= now]
        self.stats.num_action_deadlines_missed += len(late)
        return [
            (
                waiting.call_id,
                DeadlineExceededError(
                    f"the deadline passed {1000 * (now - waiting.deadline):.0f} ms ago, "
                    f"after {1000 * (now - waiting.arrived_at):.0f} ms in the queue"
                ),
            )
            for waiting in late
        ]

    def _end(self, running: _Inference) -> Iterable[ActionResult]:
        """Wait for the end. If enough are waiting, or this batch was full, the next one begins before: the
        device works on it while this one is answered. A few had better meet those that are answered now."""
        late = self._refuse_late()
        begun: Iterable[ActionResult] = ()
        members, is_full = self._most_urgent(), self._is_full(running)
        group_size = self.policies[members[0].policy].group_size if members else None
        if group_size is not None and (is_full or len(members) >= group_size):
            self._begin(members)
            begun = self._run_burst()
        return chain(late, begun, self._run_slice(running) or ())

    def _is_full(self, running: _Inference) -> bool:
        return len(running.members) >= self.policies[running.members[0].policy].max_batch_size

    def _most_urgent(self) -> list[_Waiting]:
        """Of those who wait for the policy of the most urgent, as many as a batch takes."""
        by_urgency = sorted(self._waiting, key=lambda waiting: waiting.urgency)
        name = by_urgency[0].policy if by_urgency else None
        fitting = [waiting for waiting in by_urgency if waiting.policy == name]
        return fitting[: self.policies[name].max_batch_size] if name else []

    def _begin(self, members: list[_Waiting]) -> None:
        name = members[0].policy
        policy = self.policies[name]
        num_expected = self._most_expected(name)
        self._peaks[name] = self._peaks[name][1], self._num_calls(name)
        self._running = _Inference(
            members=members,
            slices=policy.infer([member.prepared for member in members]),
            left_s=tuple(policy.slice_s(len(members))),
            started_at=self.now() if self._running is None else max(self.now(), self._running.busy_until),
            num_expected=num_expected,
        )
        self._take(members)
        self.stats.num_action_batches += 1

    def _join(self, running: _Inference, members: list[_Waiting]) -> None:
        """From now on the batch is closed until it says that it is open again."""
        policy, num_left = self.policies[running.members[0].policy], len(running.left_s)
        running.joining = [member.prepared for member in members]
        running.members += members
        running.progress = Progress.SLICE_DONE
        own_s = policy.slice_s(len(members)) if members else ()
        whole_s = policy.slice_s(len(running.members))
        running.left_s = (*own_s[: len(own_s) - num_left], *whole_s[len(whole_s) - num_left :])
        self._take(members)

    def _take(self, members: list[_Waiting]) -> None:
        """They wait no longer."""
        taken, now = {member.call_id for member in members}, self.now()
        self._waiting = [waiting for waiting in self._waiting if waiting.call_id not in taken]
        for member in members:
            member.begun_at = now

    def _run_burst(self) -> Iterable[ActionResult]:
        running = self._running
        assert running is not None
        burst_s, results = 0.0, None
        while results is None and self._is_due(running):
            burst_s += running.next_s
            if burst_s > max(self.burst_s, running.next_s):
                break
            results = self._run_slice(running)
            if running.is_on_its_way:
                break
        return results or ()

    def _is_due(self, running: _Inference) -> bool:
        """The next slice. Of an open one when nobody is waited for, and those who are there have joined."""
        if running.is_open:
            members, wait_s = self._next_members()
            if wait_s:
                return False
            self._join(running, members)
        return True

    def _run_slice(self, running: _Inference) -> Iterable[ActionResult] | None:
        """The answers, when it has ended."""
        started_at = self.now()
        self.stats.num_action_slices += not running.is_on_its_way
        joining, running.joining = running.joining, None
        try:
            running.progress = running.slices.send(joining)
        except StopIteration as done:
            self._has_ended(running)
            return self._finish(running, done.value)
        except Exception:
            logger.exception("policy %s failed", running.members[0].policy)
            self._has_ended(running)
            self.stats.num_action_errors += len(running.members)
            error = EngineError("the policy's inference failed, see the server's log")
            return [(member.call_id, error) for member in running.members]
        self._ahead_s += max(0.0, running.next_s - (self.now() - started_at))
        running.launched_s += running.next_s
        running.left_s = running.left_s[1:]
        return None

    def _has_ended(self, running: _Inference) -> None:
        """It was waited for: what the device has still to do is the next one's."""
        self._free_at = self.now()
        if self._running is running:
            self._running = None
        self._ahead_s = 0.0 if self._running is None else self._running.launched_s

    def _finish(self, running: _Inference, chunks: Iterable[Actions]) -> Iterator[ActionResult]:
        now = self.now()
        self.stats.num_action_deadlines_missed += sum(member.deadline < now for member in running.members)
        return (
            (member.call_id, self._answer(running, member, actions, now))
            for member, actions in zip(running.members, chunks, strict=True)
        )

    def _answer(
        self, running: _Inference, member: _Waiting, actions: Actions, now: float
    ) -> ActionChunk | EngineError:
        if not math.isfinite(sum(map(sum, actions))):  # of numbers that all are, it is
            self.stats.num_action_errors += 1
            return EngineError(f"policy {member.policy} computed actions that are not finite")
        self.stats.num_action_chunks += 1
        return ActionChunk(
            actions=actions,
            queued_ms=1000 * (member.begun_at - member.arrived_at),
            infer_ms=1000 * (now - member.begun_at),
            batch_size=len(running.members),
        )
