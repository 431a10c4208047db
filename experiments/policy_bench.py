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


Connect = Callable[[], AbstractContextManager[Client]]


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


def measure(connect: Connect, load: BenchLoad) -> BenchRow:
    """Let robots ask for chunks, and planners decode meanwhile. Counted from when every planner decodes."""
    samples, stop = _Samples(), threading.Event()
    decoding = threading.Barrier(load.num_planners + 1)
    with ExitStack() as stack:
        stack.enter_context(_prompt_clients())
        robots = [stack.enter_context(connect()) for _ in range(load.num_robots)]
        planners = [stack.enter_context(connect()) for _ in range(load.num_planners)]
        info = _find(stack.enter_context(connect()), load.policy)
        threads = stack.enter_context(ThreadPoolExecutor(load.num_robots + load.num_planners))
        stack.callback(stop.set)
        for client in robots[:1]:
            for _ in range(_WARM_UPS):
                client.act(load.policy, _observation(info, 0))
        running = [threads.submit(_decode, client, load, decoding, samples, stop) for client in planners]
        decoding.wait(_MAX_START_S)
        samples.since = started_at = time.monotonic()
        drive = _drive_at_once(load) if load.n_action_steps is None else partial(_drive_paced, load)
        running += [
            threads.submit(drive, client, _observation(info, number), number, samples, stop)
            for number, client in enumerate(robots)
        ]
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


def _drive_at_once(load: BenchLoad) -> Callable[[Client, ActionBody, int, _Samples, threading.Event], None]:
    """The robots' loop: rounds in which all ask at the same moment."""
    together = threading.Barrier(load.num_robots)

    def drive(
        client: Client, body: ActionBody, number: int, samples: _Samples, stop: threading.Event
    ) -> None:
        try:
            while not stop.is_set():
                together.wait()
                _ask(client, load.policy, body, samples)
        except threading.BrokenBarrierError:  # another robot has stopped after its round
            return
        finally:
            together.abort()

    return drive


def _drive_paced(
    load: BenchLoad,
    client: Client,
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
        _ask(client, load.policy, body, samples)
        due_at = max(due_at + period_s, started_at)


def _ask(client: Client, policy: str, body: ActionBody, samples: _Samples) -> None:
    started_at = time.monotonic()
    chunk = client.act(policy, body)
    samples.chunk_ms.append(1000 * (time.monotonic() - started_at))
    samples.chunks.append(replace(chunk, actions=()))  # thousands of numbers would be looked after


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
