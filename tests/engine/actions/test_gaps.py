"""How long tokens and chunks wait for each other: the real scheduler in front of a simulated GPU.

The GPU does what is launched in order; the host goes on unless it waits for a result. Durations are those of
an H200 with SmolVLA of 450M parameters and Llama 3.1 8B for eight sessions; those of two and four robots, and
the prefix of 24, were not measured, and lie in between.
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

IMAGES_S = {1: 0.0011, 2: 0.0018, 4: 0.0033, 8: 0.0062}  # of so many robots
REST_S = {  # by batch size: the prefix, and five slices of two Euler steps
    1: (0.0007, *[0.0009] * 5),
    2: (0.0008, *[0.0010] * 5),
    4: (0.0010, *[0.0011] * 5),
    8: (0.0013, *[0.0012] * 5),
    16: (0.0021, *[0.0014] * 5),
    24: (0.0032, *[0.0018] * 5),
}
GROUP_SIZE = 8
DECODE_S = 0.0045
SAMPLE_S = 0.0001
# Of the host: reading a request, the images of a group, launching a slice and a decode step, sending tokens.
SUBMIT_S, START_S, LAUNCH_S, LAUNCH_DECODE_S, SEND_S = 0.0003, 0.0015, 0.0004, 0.0012, 0.0010

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
    max_batch_size: int = 24
    group_size: int | None = GROUP_SIZE
    info: PolicyInfo = field(
        default_factory=lambda: PolicyInfo(
            name="arm", kind="arm", cameras=(), state_dim=1, action_dim=1, chunk_size=1, n_action_steps=1
        )
    )

    def slice_s(self, batch_size: int) -> tuple[float, ...]:
        groups = [min(GROUP_SIZE, batch_size - first) for first in range(0, batch_size, GROUP_SIZE)]
        return (*(at_least(IMAGES_S, group) for group in groups), *at_least(REST_S, batch_size))

    def prepare(self, request: ActionRequest) -> float:
        self.gpu.now_s += SUBMIT_S
        return request.state[0]

    def infer(self, batch: Sequence[float]) -> Generator[Progress, Sequence[float] | None, list[Actions]]:
        members, waiting = list[float](), list(batch)
        while waiting:
            group, waiting = waiting[:GROUP_SIZE], waiting[GROUP_SIZE:]
            members += group
            self.gpu.now_s += START_S
            self.gpu.launch(at_least(IMAGES_S, len(group)))
            may_grow = not waiting and len(members) < self.max_batch_size
            waiting += (yield Progress.OPEN if may_grow else Progress.SLICE_DONE) or ()
        *first, last = at_least(REST_S, len(members))
        for seconds in first:
            self.gpu.now_s += LAUNCH_S
            self.gpu.launch(seconds)
            yield Progress.SLICE_DONE
        self.gpu.now_s += LAUNCH_S
        end = self.gpu.launch(last)
        yield Progress.ON_ITS_WAY
        self.gpu.wait(end)
        return [((state,),) for state in members]


def at_least[T](by_size: dict[int, T], size: int) -> T:
    """Of the smallest size that is large enough."""
    return next(value for key, value in by_size.items() if key >= size)


def run(arrivals: list[float], *, decodes: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Seconds between tokens, and from each arrival to its chunk, in the loop of the engine's core."""
    gpu = Gpu()
    scheduler = ActionScheduler({"arm": Policy(gpu)}, now=gpu.clock)
    waiting = sorted(enumerate(arrivals), key=lambda robot: robot[1])
    token_at: list[float] = []
    chunk_s: list[float] = []
    gpu.launch(DECODE_S)  # runs ahead
    while (decodes and gpu.now_s < SECONDS) or scheduler.has_work or waiting:
        looked_at = gpu.now_s
        while waiting and waiting[0][1] <= looked_at:
            call_id, _ = waiting.pop(0)
            scheduler.submit(call_id, ActionRequest(policy="arm", images={}, state=(1.0,), instruction="go"))
            if scheduler.is_awaited and not decodes:
                break
        for call_id, _ in scheduler.step():
            chunk_s.append(gpu.now_s - arrivals[call_id])
        if not decodes:
            idle_s = scheduler.idle_s()
            due = [] if idle_s is None else [gpu.now_s + idle_s]
            gpu.wait(min([*due, *(arrival for _, arrival in waiting)], default=0.0))
        elif scheduler.leaves_time_for_tokens():
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
    slices = IMAGES_S[1] + sum(REST_S[1])
    assert disturbed.sum() - len(disturbed) * (DECODE_S + SAMPLE_S) < slices + SUBMIT_S + START_S


UNTIL_BEGUN_S = GROUP_SIZE * SUBMIT_S + START_S


def gpu_s(num_robots: int) -> float:
    """What a batch of whole groups takes."""
    return num_robots // GROUP_SIZE * IMAGES_S[GROUP_SIZE] + sum(at_least(REST_S, num_robots))


def test_many_robots_wait_for_the_first_images_and_not_for_all():
    """The GPU works on those of eight while the host reads the others', and does not idle in between."""
    number = 24
    rounds = [second + SUBMIT_S * robot for second in range(5) for robot in range(number)]
    _, chunks = run([float(at) for at in rounds], decodes=False)
    assert len(chunks) == 5 * number
    assert chunks[-number:].max() == pytest.approx(UNTIL_BEGUN_S + gpu_s(number), abs=0.002)
    assert chunks[-number:].max() < number * SUBMIT_S + START_S + gpu_s(number) - 0.004


def test_of_more_than_a_batch_most_are_answered_before_the_last():
    """32 robots ask at once: 24 have their chunks while those of eight are computed, without a gap before."""
    _, chunks = run([1.0] * 32, decodes=False)
    assert chunks[:24] == pytest.approx(UNTIL_BEGUN_S + gpu_s(24), abs=0.0001)
    assert chunks[24:] == pytest.approx(UNTIL_BEGUN_S + gpu_s(24) + gpu_s(8), abs=0.0001)
    assert np.median(chunks) < 0.040


def test_the_gpu_works_on_the_next_batch_while_one_is_answered():
    """Those who come meanwhile are read before the end is waited for: the GPU does not idle then."""
    number, later_s = 24, 0.020
    _, chunks = run([1.0] * number + [1.0 + later_s] * number, decodes=False)
    assert later_s + chunks[number:].max() == pytest.approx(UNTIL_BEGUN_S + 2 * gpu_s(number), abs=0.0001)
