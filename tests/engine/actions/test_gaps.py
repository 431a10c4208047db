"""How long tokens and chunks wait for each other: the real scheduler in front of a simulated GPU.

The GPU does what is launched in order; the host goes on unless it waits for a result. Durations are those of
an H200 with SmolVLA of 450M parameters and Llama 3.1 8B for eight sessions; those of two and four robots were
not measured, and lie in between.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from dayshift.engine.action_api import ActionRequest, Actions, PolicyInfo
from dayshift.engine.action_scheduler import ActionScheduler
from dayshift.engine.servable import Progress

SLICES_S = {  # by batch size: the prefix, and five slices of two Euler steps
    1: (0.0020, *[0.0012] * 5),
    2: (0.0030, *[0.0013] * 5),
    4: (0.0046, *[0.0014] * 5),
    8: (0.0080, *[0.0015] * 5),
}
DECODE_S = 0.0045
SAMPLE_S = 0.0001
# Of the host: reading a request, starting a batch, launching a slice and a decode step, sending tokens.
SUBMIT_S, START_S, LAUNCH_S, LAUNCH_DECODE_S, SEND_S = 0.0007, 0.0015, 0.0004, 0.0012, 0.0010

NUM_ROBOTS = 8
PERIOD_S = 0.5  # ten actions at 20 Hz
SECONDS = 20.0


@dataclass
class Gpu:
    """With the clock of the host beside it."""

    now_s: float = 0.0
    free_at: float = 0.0

    def clock(self) -> float:
        return self.now_s

    def launch(self, seconds: float) -> float:
        """When this will have been done."""
        self.free_at = max(self.free_at, self.now_s) + seconds
        return self.free_at

    def wait(self, until: float) -> None:
        self.now_s = max(self.now_s, until)


@dataclass
class Policy:
    """As the served SmolVLA."""

    gpu: Gpu
    max_batch_size: int = 8
    group_size: int | None = None
    info: PolicyInfo = field(
        default_factory=lambda: PolicyInfo(
            name="arm", kind="arm", cameras=(), state_dim=1, action_dim=1, chunk_size=1, n_action_steps=1
        )
    )

    def slice_s(self, batch_size: int) -> tuple[float, ...]:
        return next(slices for size, slices in SLICES_S.items() if size >= batch_size)

    def prepare(self, request: ActionRequest) -> float:
        self.gpu.now_s += SUBMIT_S
        return request.state[0]

    def infer(self, batch: Sequence[float]) -> Generator[Progress, Sequence[float] | None, list[Actions]]:
        self.gpu.now_s += START_S
        *first, last = self.slice_s(len(batch))
        for seconds in first:
            self.gpu.now_s += LAUNCH_S
            self.gpu.launch(seconds)
            yield Progress.SLICE_DONE
        self.gpu.now_s += LAUNCH_S
        end = self.gpu.launch(last)
        yield Progress.ON_ITS_WAY
        self.gpu.wait(end)
        return [((state,),) for state in batch]


def run(arrivals: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds between tokens, and from each arrival to its chunk, in the loop of the engine's core."""
    gpu = Gpu()
    scheduler = ActionScheduler({"arm": Policy(gpu)}, now=gpu.clock)
    waiting = sorted(enumerate(arrivals), key=lambda robot: robot[1])
    token_at: list[float] = []
    chunk_s: list[float] = []
    gpu.launch(DECODE_S)  # runs ahead
    while gpu.now_s < SECONDS or scheduler.has_work:
        while waiting and waiting[0][1] <= gpu.now_s:
            call_id, _ = waiting.pop(0)
            scheduler.submit(call_id, ActionRequest(policy="arm", images={}, state=(1.0,), instruction="go"))
        for call_id, _ in scheduler.step():
            chunk_s.append(gpu.now_s - arrivals[call_id])
        if scheduler.leaves_time_for_tokens():
            began_at = gpu.now_s
            sampled_at = gpu.launch(SAMPLE_S)
            gpu.now_s += LAUNCH_DECODE_S
            gpu.launch(DECODE_S)
            gpu.wait(sampled_at)
            gpu.now_s += SEND_S
            token_at.append(gpu.now_s)
            scheduler.on_engine_step(gpu.now_s - began_at)
    return np.diff(token_at), np.array(chunk_s)


def arrivals_of(phases: Sequence[float]) -> list[float]:
    rounds = int(SECONDS / PERIOD_S)
    return [phase + number * PERIOD_S for number in range(rounds) for phase in phases]


def test_tokens_alone_come_as_fast_as_they_are_decoded():
    gaps, _ = run([])
    assert np.median(gaps) == pytest.approx(DECODE_S + SAMPLE_S)
    assert gaps.max() < DECODE_S + SAMPLE_S + SEND_S


@pytest.mark.parametrize("seed", range(5))
def test_robots_at_any_phase_are_in_time_and_tokens_too(seed: int):
    rng = random.Random(seed)
    gaps, chunks = run(arrivals_of([rng.random() * PERIOD_S for _ in range(NUM_ROBOTS)]))
    assert len(chunks) == NUM_ROBOTS * SECONDS / PERIOD_S
    assert np.percentile(gaps, 50) < 1.2 * (DECODE_S + SAMPLE_S)
    assert np.percentile(gaps, 99) < 0.015
    assert np.percentile(chunks, 99) < 0.040


def test_robots_that_ask_together_are_in_time_and_tokens_too():
    gaps, chunks = run(arrivals_of([0.1] * NUM_ROBOTS))
    assert np.percentile(gaps, 99) < 0.015
    assert chunks.max() < 0.040


def test_the_gpu_never_idles_when_a_chunk_ends():
    """A step of the LLM is there behind the last slice: the gap after it is its own time alone."""
    gaps, _ = run([1.0])
    disturbed = gaps[gaps > DECODE_S + SAMPLE_S + 1e-6]
    slices = sum(SLICES_S[1])
    assert disturbed.sum() - len(disturbed) * (DECODE_S + SAMPLE_S) < slices + SUBMIT_S + START_S
