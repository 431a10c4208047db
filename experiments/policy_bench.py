"""How long robots wait for action chunks, and planners for tokens, when they share one engine."""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np

from dayshift.engine.action_api import ActionBody, ActionChunk, CameraImage, PolicyInfo
from dayshift.engine.api import GenerateChunk, SamplingParams, SessionConfig, SessionInfo, TurnRequest
from dayshift.sim.types import CONTROL_HZ

SENTENCE = "put the wine bottle on top of the cabinet"
WINDOW = 8192  # tokens of a planner's session

_IMAGE_SIDE = 256
_WARM_UPS = 3
_MAX_START_S = 60.0
_FIRST_TOKENS = 3  # a planner decodes when it has got so many
_SWITCH_S = 0.0002


class Client(Protocol):
    """One robot's or planner's connection to the engine: `DayshiftClient`, or one that leaves HTTP out."""

    def policies(self) -> Sequence[PolicyInfo]: ...
    def act(self, policy: str, body: ActionBody) -> ActionChunk: ...
    def open_session(self, config: SessionConfig) -> SessionInfo: ...
    def stream_turn(self, request: TurnRequest) -> Iterable[GenerateChunk]: ...
    def close_session(self, session_id: str) -> None: ...


class Fleet(Protocol):
    """Robots that ask at the same moment."""

    def ask(self, policy: str, bodies: Sequence[ActionBody]) -> Sequence[tuple[ActionChunk, float]]:
        """Of each robot, its chunk, and the seconds from that moment until it had it."""
        ...


Connect = Callable[[], AbstractContextManager[Client]]


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """An engine, and how robots and planners reach it."""

    connect: Connect
    assemble: Callable[[int], AbstractContextManager[Fleet]]
    """A fleet of so many robots."""

    @classmethod
    def of_clients(cls, connect: Connect) -> BenchTarget:
        """Whose fleet is a thread for each client."""
        return cls(connect, partial(_threaded_fleet, connect))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad:
    """What one measurement lets run, for so many seconds.

    With `n_action_steps` each robot asks as often as one that executes so many actions at 20 Hz; without,
    all ask at the same moment, and again when all are answered.
    """

    policy: str
    num_robots: int
    num_planners: int = 0
    n_action_steps: int | None = None
    context: int = 200  # tokens of a planner's prompt
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One measurement. Latencies are the robots' own, in ms; `None` without planners or robots."""

    policy: str
    num_robots: int
    num_planners: int
    is_paced: bool
    num_chunks: int
    chunks_per_s: float
    chunk_p50_ms: float | None
    chunk_p95_ms: float | None
    chunk_p99_ms: float | None
    queued_p50_ms: float | None
    infer_p50_ms: float | None
    infer_p99_ms: float | None
    mean_batch_size: float | None
    num_tokens: int
    token_p50_ms: float | None
    token_p99_ms: float | None
    token_p50_ratio: float | None = None  # to the planners alone
    token_p99_ratio: float | None = None


@dataclass(slots=True)
class _Samples:
    """What the threads saw since `since`; each appends through the interpreter's lock."""

    since: float = math.inf
    chunk_ms: list[float] = field(default_factory=list)
    chunks: list[ActionChunk] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)

    def add(self, chunk: ActionChunk, seconds: float) -> None:
        """A robot has got its chunk after so long."""
        self.chunk_ms.append(1000 * seconds)
        self.chunks.append(replace(chunk, actions=()))  # thousands of numbers would be looked after


class _ThreadedFleet:
    """A client and a thread for each robot."""

    def __init__(self, clients: Sequence[Client], threads: ThreadPoolExecutor) -> None:
        self._clients, self._threads = clients, threads
        self._together = threading.Barrier(len(clients))

    def ask(self, policy: str, bodies: Sequence[ActionBody]) -> Sequence[tuple[ActionChunk, float]]:
        """See Fleet."""

        def ask_one(client: Client, body: ActionBody) -> tuple[ActionChunk, float]:
            self._together.wait(_MAX_START_S)
            started_at = time.monotonic()
            chunk = client.act(policy, body)
            return chunk, time.monotonic() - started_at

        return list(self._threads.map(ask_one, self._clients, bodies))


@contextmanager
def _threaded_fleet(connect: Connect, num_robots: int) -> Iterator[Fleet]:
    with ExitStack() as stack:
        clients = [stack.enter_context(connect()) for _ in range(num_robots)]
        yield _ThreadedFleet(clients, stack.enter_context(ThreadPoolExecutor(num_robots)))


def measure(target: BenchTarget, load: BenchLoad) -> BenchRow:
    """Let robots ask for chunks, and planners decode meanwhile. Counted from when every planner decodes."""
    samples, stop = _Samples(), threading.Event()
    decoding = threading.Barrier(load.num_planners + 1)
    with ExitStack() as stack:
        stack.enter_context(_prompt_clients())
        planners = [stack.enter_context(target.connect()) for _ in range(load.num_planners)]
        first = stack.enter_context(target.connect())
        info = _find(first, load.policy)
        for _ in range(_WARM_UPS if load.num_robots else 0):
            first.act(load.policy, _observation(info, 0))
        drives = _drives(target, load, info, samples, stop, stack)
        threads = stack.enter_context(ThreadPoolExecutor(max(1, len(drives) + len(planners))))
        stack.callback(stop.set)
        running = [threads.submit(_decode, client, load, decoding, samples, stop) for client in planners]
        decoding.wait(_MAX_START_S)
        samples.since = started_at = time.monotonic()
        running += [threads.submit(drive) for drive in drives]
        stop.wait(load.seconds)
        stop.set()
        for thread in running:
            thread.result()
        elapsed_s = time.monotonic() - started_at
    return _summary(load, samples, elapsed_s)


@contextmanager
def _prompt_clients() -> Iterator[None]:
    """Let dozens of clients in one process hinder each other as little as they can.

    A thread that computes keeps the interpreter for 5 ms unless told otherwise, and a collection of what
    the libraries have made at import takes a hundred or more: robots and planners, which are computers of
    their own, would seem to wait for the engine.
    """
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(switch_s)


def _summary(load: BenchLoad, samples: _Samples, elapsed_s: float) -> BenchRow:
    batch_sizes = [chunk.batch_size for chunk in samples.chunks]
    return BenchRow(
        policy=load.policy,
        num_robots=load.num_robots,
        num_planners=load.num_planners,
        is_paced=load.n_action_steps is not None,
        num_chunks=len(samples.chunk_ms),
        chunks_per_s=len(samples.chunk_ms) / elapsed_s,
        chunk_p50_ms=_percentile(samples.chunk_ms, 50),
        chunk_p95_ms=_percentile(samples.chunk_ms, 95),
        chunk_p99_ms=_percentile(samples.chunk_ms, 99),
        queued_p50_ms=_percentile([chunk.queued_ms for chunk in samples.chunks], 50),
        infer_p50_ms=_percentile([chunk.infer_ms for chunk in samples.chunks], 50),
        infer_p99_ms=_percentile([chunk.infer_ms for chunk in samples.chunks], 99),
        mean_batch_size=float(np.mean(batch_sizes)) if batch_sizes else None,
        num_tokens=len(samples.token_ms),
        token_p50_ms=_percentile(samples.token_ms, 50),
        token_p99_ms=_percentile(samples.token_ms, 99),
    )


def _drives(
    target: BenchTarget,
    load: BenchLoad,
    info: PolicyInfo,
    samples: _Samples,
    stop: threading.Event,
    stack: ExitStack,
) -> list[Callable[[], None]]:
    """What the robots' threads do: one for all that ask together, or one for each."""
    bodies = [_observation(info, number) for number in range(load.num_robots)]
    if not bodies:
        return []
    if load.n_action_steps is None:
        fleet = stack.enter_context(target.assemble(load.num_robots))
        return [partial(_drive_at_once, fleet, load, bodies, samples, stop)]
    robots = [stack.enter_context(target.connect()) for _ in bodies]
    return [
        partial(_drive_paced, client, load, body, number, samples, stop)
        for number, (client, body) in enumerate(zip(robots, bodies, strict=True))
    ]


def _drive_at_once(
    fleet: Fleet, load: BenchLoad, bodies: Sequence[ActionBody], samples: _Samples, stop: threading.Event
) -> None:
    """Rounds in which all ask at the same moment."""
    while not stop.is_set():
        for chunk, seconds in fleet.ask(load.policy, bodies):
            samples.add(chunk, seconds)


def _drive_paced(
    client: Client,
    load: BenchLoad,
    body: ActionBody,
    number: int,
    samples: _Samples,
    stop: threading.Event,
) -> None:
    """One robot at 20 Hz. The robots begin spread over the period."""
    period_s = (load.n_action_steps or 1) / CONTROL_HZ
    due_at = time.monotonic() + number / load.num_robots * period_s
    while not stop.wait(max(0.0, due_at - time.monotonic())):
        started_at = time.monotonic()
        chunk = client.act(load.policy, body)
        samples.add(chunk, time.monotonic() - started_at)
        due_at = max(due_at + period_s, started_at)


def _decode(
    client: Client, load: BenchLoad, decoding: threading.Barrier, samples: _Samples, stop: threading.Event
) -> None:
    """One planner session that decodes turn after turn; the time to a turn's first token is not counted."""
    session_id = client.open_session(SessionConfig(window=WINDOW)).session_id
    sampling = SamplingParams(max_tokens=(WINDOW - load.context) // 2, ignore_eos=True)
    turn = 0
    while not stop.is_set():
        turn += 1
        request = TurnRequest(
            request_id=f"{session_id}-{turn}",
            session_id=session_id,
            at=float(turn),
            token_ids=(5,) * load.context,
            sampling=sampling,
        )
        last_at = None
        for num_tokens, _ in enumerate(client.stream_turn(request), start=1):
            now = time.monotonic()
            if turn == 1 and num_tokens == _FIRST_TOKENS:
                decoding.wait(_MAX_START_S)
            if last_at is not None and last_at >= samples.since:
                samples.token_ms.append(1000 * (now - last_at))
            last_at = now
            if stop.is_set():
                break
    client.close_session(session_id)


def _find(client: Client, policy: str) -> PolicyInfo:
    return next(info for info in client.policies() if info.name == policy)


def _observation(info: PolicyInfo, number: int) -> ActionBody:
    rng = np.random.default_rng(number)
    image = CameraImage(height=_IMAGE_SIDE, width=_IMAGE_SIDE, data=rng.bytes(_IMAGE_SIDE**2 * 3))
    return ActionBody(
        images=dict.fromkeys(info.cameras, image),
        state=tuple(rng.random(info.state_dim).tolist()),
        instruction=SENTENCE,
        seed=number,
    )


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
