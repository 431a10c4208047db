"""A served policy as a robot follows it: `RemotePolicy.act` is one control step.

    observe ──► is a chunk due? ──► ask the server ┐      (paced: in the background, while the robot goes on)
    act     ◄── the queue's action for this step ◄─┘
            ◄── none that is fresh: hold still, count it, ask again

Two ways of keeping time. `WAIT`: the simulator stands still until the chunk is there, so that a rollout
depends on nothing but its seed; an evaluation wants that. `REAL_TIME`: control steps come at LIBERO's 20 Hz
whatever the server does, as on a real robot.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dayshift.engine.api import EngineError, InvalidRequestError
from dayshift.engine.wire import EngineUnreachableError
from dayshift.policy.remote.chunk_queue import Blending, Chunk, ChunkOptions, ChunkQueue
from dayshift.policy.remote.connections import ChunkRequest, Connection, connect
from dayshift.policy.replay import HOLD
from dayshift.sim.types import CONTROL_HZ, Action, Observation, PolicyFactory, RolloutSpec
from dayshift.types import DayshiftError

if TYPE_CHECKING:
    from dayshift.sim.libero_env import LiberoEnv

STEP_S = 1 / CONTROL_HZ
ACTION_DIM = 7
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 2.0
_NUM_DELAYS = 10  # of the last chunks, from which the next one's delay is foreseen


class PolicyOutageError(Exception):
    """The server gave no chunk for longer than allowed. The attempt ends; it is not the robot's failure."""


class Pace(StrEnum):
    """Who waits for whom; see above."""

    WAIT = "wait"
    REAL_TIME = "real_time"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """How a served policy is followed.

    `n_action_steps` None: as many as the policy was meant to use. `max_outage_s`: after so long without
    any chunk the attempt is given back as `infra`. `n_late_steps` None: as many as `n_action_steps`.
    """

    n_action_steps: int | None = None
    n_late_steps: int | None = None
    n_ahead_steps: int = 0
    blending: Blending = Blending.REPLACE
    pace: Pace = Pace.WAIT
    timeout_s: float | None = None  # for one chunk; default: 30, in real time 1
    max_outage_s: float = 60.0

    @property
    def call_timeout_s(self) -> float:
        """Longest wait for one chunk."""
        if self.timeout_s is not None:
            return self.timeout_s
        return 1.0 if self.pace is Pace.REAL_TIME else 30.0


def remote_policy(url: str, options: RemoteOptions) -> PolicyFactory:
    """A policy behind a server; `url` as `connections.connect` takes it."""
    return partial(_make, url=url, options=options)


def _make(env: LiberoEnv, *, url: str, options: RemoteOptions) -> RemotePolicy:
    """In the simulator's process, which may be started again while the server is."""
    give_up_at = time.monotonic() + options.max_outage_s
    while True:
        try:
            return RemotePolicy(connect(url, timeout_s=options.call_timeout_s), options)
        except EngineUnreachableError:
            if time.monotonic() >= give_up_at:
                raise
            time.sleep(_LAST_RETRY_S)


def chunk_options(connection: Connection, options: RemoteOptions) -> ChunkOptions:
    """How the chunks of this server are used. Raises DayshiftError for options that it has no place for."""
    if options.blending is Blending.RTC and not connection.has_guidance:
        raise DayshiftError("blending rtc needs a server of ours; openpi's protocol has no place for it")
    num_used = options.n_action_steps or connection.n_action_steps
    if num_used is None:
        raise DayshiftError("n_action_steps must be given: this server does not say how many it means")
    if connection.chunk_size is not None and num_used > connection.chunk_size:
        raise DayshiftError(
            f"n_action_steps is {num_used}; the policy's chunks allow 1 to {connection.chunk_size}"
        )
    num_late = num_used if options.n_late_steps is None else options.n_late_steps
    return ChunkOptions(
        n_action_steps=num_used,
        n_late_steps=num_late,
        n_ahead_steps=min(options.n_ahead_steps, num_used - 1),
        blending=options.blending,
    )


class RemotePolicy:
    """A `VisionPolicy` and `ReportingPolicy`."""

    def __init__(self, connection: Connection, options: RemoteOptions) -> None:
        self._connection = connection
        self._options = options
        self._queue = ChunkQueue(chunk_options(connection, options))
        self._executor = ThreadPoolExecutor(1, "policy-request")
        self._asked: _Asked | None = None
        self._delays: deque[int] = deque(maxlen=_NUM_DELAYS)
        self._counts: Counter[str] = Counter()
        self._start(0)

    def reset(self, spec: RolloutSpec) -> None:
        self._asked = None  # an answer that is still on its way belongs to another scene
        self._queue.clear()
        self._counts = Counter()
        words = f"{spec.task}/{spec.init_state_id}/{spec.seed}"
        self._start(int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "big"))

    def needs_images(self) -> bool:
        self._take_answer()
        return self._asked is None and self._queue.is_due(self._step) and time.monotonic() >= self._retry_at

    def act(self, observation: Observation) -> Action:
        if observation.images and self.needs_images():
            self._ask(observation)
        if self._options.pace is Pace.WAIT:
            self._wait_for_chunk(observation)
        else:
            self._wait_for_tick()
            self._take_answer()
            self._check_outage()
        action = self._queue.action(self._step)
        if action is None:
            action = HOLD.copy()
            action[6] = self._gripper
            self._counts["num_held_steps"] += 1
        self._gripper = float(action[6])
        self._step += 1
        return np.clip(action, -1.0, 1.0)

    def report(self) -> Mapping[str, float]:
        """num_chunks, num_held_steps, num_stale_chunks, num_failed_requests, max_latency_ms."""
        names = ("num_chunks", "num_held_steps", "num_stale_chunks", "num_failed_requests")
        return {name: self._counts[name] for name in names} | {"max_latency_ms": self._max_latency_ms}

    def close(self) -> None:
        """Let the connection go."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._connection.close()

    # ---- a rollout's state ----

    def _start(self, seed: int) -> None:
        self._seed = seed
        self._step = 0
        self._gripper = float(HOLD[6])
        self._started_at = self._last_chunk_at = time.monotonic()
        self._retry_at, self._retry_s = 0.0, _FIRST_RETRY_S
        self._max_latency_ms = 0.0

    # ---- asking and taking ----

    def _ask(self, observation: Observation) -> None:
        left = self._queue.left(self._step) if self._options.blending is Blending.RTC else None
        num_usable = self._queue.options.n_action_steps + self._queue.options.n_late_steps
        is_paced = self._options.pace is Pace.REAL_TIME
        request = ChunkRequest(
            deadline_s=num_usable * STEP_S if is_paced else None,
            seed=(self._seed + self._step) % 2**32,
            left=left,
            num_frozen=max(self._delays, default=0) if is_paced else 0,
        )
        self._asked = _Asked(
            step=self._step,
            at=time.monotonic(),
            answer=self._executor.submit(self._call, observation, request),
        )

    def _call(self, observation: Observation, request: ChunkRequest) -> Chunk:
        chunk = self._connection.act(observation, request)
        if chunk.shape[1] != ACTION_DIM:
            raise InvalidRequestError(f"the policy's actions have {chunk.shape[1]} numbers; LIBERO's have 7")
        return chunk

    def _take_answer(self) -> None:
        """Put a chunk that has arrived into the queue, or see to it that it is asked for again."""
        asked = self._asked
        if asked is None or not asked.answer.done():
            return
        self._asked = None
        now = time.monotonic()
        error = asked.answer.exception()
        if isinstance(error, InvalidRequestError):
            raise error  # it would be refused again
        if isinstance(error, EngineError):
            self._counts["num_failed_requests"] += 1
            self._retry_at = now + self._retry_s
            self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)
            return
        chunk = asked.answer.result()  # raises what is a defect
        self._retry_s = _FIRST_RETRY_S
        self._last_chunk_at = now
        self._max_latency_ms = max(self._max_latency_ms, 1000 * (now - asked.at))
        self._delays.append(self._step - asked.step)
        self._counts["num_chunks"] += 1
        if not self._queue.push(chunk, asked.step, self._step):
            self._counts["num_stale_chunks"] += 1

    def _wait_for_chunk(self, observation: Observation) -> None:
        """Until the queue has an action for this step; the simulator waits."""
        while self._asked is not None or self._queue.action(self._step) is None:
            if self._asked is None:
                time.sleep(max(0.0, self._retry_at - time.monotonic()))
                self._ask(observation)
            assert self._asked is not None
            self._asked.answer.exception()  # waits
            self._take_answer()
            self._check_outage()

    def _check_outage(self) -> None:
        outage_s = time.monotonic() - self._last_chunk_at
        if outage_s > self._options.max_outage_s and self._queue.action(self._step) is None:
            raise PolicyOutageError(f"no action chunk for {outage_s:.0f} s")

    def _wait_for_tick(self) -> None:
        time.sleep(max(0.0, self._started_at + self._step * STEP_S - time.monotonic()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request that is on its way."""

    step: int
    at: float
    answer: Future[Chunk]
