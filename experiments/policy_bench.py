"""How long robots wait for action chunks, and planners for tokens, when they share one engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from dayshift.engine.action_api import ActionBody, CameraImage, PolicyInfo
from dayshift.engine.api import SamplingParams, SessionConfig, TurnRequest
from dayshift.engine.client import DayshiftClient
from dayshift.sim.types import CONTROL_HZ

SENTENCE = "put the wine bottle on top of the cabinet"
_IMAGE_SIDE = 256
_WARM_UPS = 3
_PLANNER_PROMPT = tuple([5] * 200)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One measurement. Latencies are the robots' own, in ms; `None` without planners or robots."""

    num_robots: int
    num_planners: int
    is_paced: bool
    num_chunks: int
    chunks_per_s: float
    chunk_p50_ms: float | None
    chunk_p95_ms: float | None
    chunk_p99_ms: float | None
    infer_p50_ms: float | None
    mean_batch_size: float | None
    token_p50_ms: float | None
    token_p99_ms: float | None


@dataclass(slots=True)
class _Samples:
    """What the threads saw; each appends to its own lists only through the interpreter's lock."""

    chunk_ms: list[float] = field(default_factory=list)
    infer_ms: list[float] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)


def measure(
    url: str,
    policy: str,
    *,
    num_robots: int,
    num_planners: int,
    seconds: float,
    n_action_steps: int | None,
) -> BenchRow:
    """Let robots ask for chunks for so long, and planners decode meanwhile.

    With `n_action_steps` each robot asks as often as one that executes so many actions at 20 Hz; without, it
    asks again at once.
    """
    samples, stop = _Samples(), threading.Event()
    with ExitStack() as stack:
        robots = [stack.enter_context(DayshiftClient(url)) for _ in range(num_robots)]
        planners = [stack.enter_context(DayshiftClient(url)) for _ in range(num_planners)]
        info = _find(stack.enter_context(DayshiftClient(url)), policy)
        threads = stack.enter_context(ThreadPoolExecutor(max(1, num_robots + num_planners)))
        stack.callback(stop.set)
        for client in robots[:1]:
            for _ in range(_WARM_UPS):
                client.act(policy, _observation(info, 0))
        period_s = None if n_action_steps is None else n_action_steps / CONTROL_HZ
        running = [
            threads.submit(_drive, client, info, period_s, number, num_robots, samples, stop)
            for number, client in enumerate(robots)
        ]
        running += [threads.submit(_decode, client, samples, stop) for client in planners]
        started_at = time.monotonic()
        stop.wait(seconds)
        stop.set()
        for thread in running:
            thread.result()
        elapsed_s = time.monotonic() - started_at
    return BenchRow(
        num_robots=num_robots,
        num_planners=num_planners,
        is_paced=n_action_steps is not None,
        num_chunks=len(samples.chunk_ms),
        chunks_per_s=len(samples.chunk_ms) / elapsed_s,
        chunk_p50_ms=_percentile(samples.chunk_ms, 50),
        chunk_p95_ms=_percentile(samples.chunk_ms, 95),
        chunk_p99_ms=_percentile(samples.chunk_ms, 99),
        infer_p50_ms=_percentile(samples.infer_ms, 50),
        mean_batch_size=float(np.mean(samples.batch_sizes)) if samples.batch_sizes else None,
        token_p50_ms=_percentile(samples.token_ms, 50),
        token_p99_ms=_percentile(samples.token_ms, 99),
    )


def _drive(
    client: DayshiftClient,
    info: PolicyInfo,
    period_s: float | None,
    number: int,
    num_robots: int,
    samples: _Samples,
    stop: threading.Event,
) -> None:
    """One robot. Paced ones begin spread over the period."""
    body = _observation(info, number)
    due_at = time.monotonic() + (0.0 if period_s is None else number / num_robots * period_s)
    while not stop.wait(max(0.0, due_at - time.monotonic())):
        started_at = time.monotonic()
        chunk = client.act(info.name, body)
        samples.chunk_ms.append(1000 * (time.monotonic() - started_at))
        samples.infer_ms.append(chunk.infer_ms)
        samples.batch_sizes.append(chunk.batch_size)
        due_at = time.monotonic() if period_s is None else max(due_at + period_s, started_at)


def _decode(client: DayshiftClient, samples: _Samples, stop: threading.Event) -> None:
    """One planner session that decodes turn after turn; the time to a turn's first token is not counted."""
    session_id = client.open_session(SessionConfig()).session_id
    sampling = SamplingParams(max_tokens=256, ignore_eos=True)
    turn = 0
    while not stop.is_set():
        turn += 1
        request = TurnRequest(
            request_id=f"{session_id}-{turn}",
            session_id=session_id,
            at=float(turn),
            token_ids=_PLANNER_PROMPT,
            sampling=sampling,
        )
        last_at = None
        for _ in client.stream_turn(request):
            now = time.monotonic()
            if last_at is not None:
                samples.token_ms.append(1000 * (now - last_at))
            last_at = now
            if stop.is_set():
                break
    client.close_session(session_id)


def _find(client: DayshiftClient, policy: str) -> PolicyInfo:
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
