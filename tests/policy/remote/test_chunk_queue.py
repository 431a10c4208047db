"""No action is executed at another step than the one it was predicted for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayshift.policy.remote.chunk_queue import Blending, Chunk, ChunkOptions, ChunkQueue

LENGTH = 10


def chunk(observed_at: int, length: int = LENGTH) -> Chunk:
    """Each action names the step that it belongs to."""
    return np.arange(observed_at, observed_at + length, dtype=np.float32)[:, None].repeat(7, axis=1)


@given(
    n_action_steps=st.integers(1, 12),
    n_late_steps=st.integers(0, 6),
    n_ahead_steps=st.integers(0, 5),
    blending=st.sampled_from(Blending),
    delays=st.lists(st.integers(0, 25), min_size=1, max_size=30),
)
def test_every_action_belongs_to_its_step(
    n_action_steps: int, n_late_steps: int, n_ahead_steps: int, blending: Blending, delays: list[int]
) -> None:
    options = ChunkOptions(
        n_action_steps=n_action_steps,
        n_late_steps=n_late_steps,
        n_ahead_steps=min(n_ahead_steps, n_action_steps - 1),
        blending=blending,
    )
    queue = ChunkQueue(options)
    asked: tuple[int, int] | None = None  # observed at, arrives at
    last_observation = 0
    pending = list(delays)
    for step in range(120):
        if asked is None and pending and queue.is_due(step):
            asked = step, step + pending.pop()
        if asked is not None and step >= asked[1]:
            if queue.push(chunk(asked[0]), asked[0], step):
                last_observation = asked[0]
            asked = None
        action = queue.action(step)
        if action is not None:
            # Chunks that agree blend to themselves, so this holds for every blending.
            assert action == pytest.approx(np.full(7, step), abs=1e-3)
            assert step - last_observation < min(LENGTH, n_action_steps + n_late_steps)


def test_without_delay_n_action_steps_of_each_chunk_are_executed() -> None:
    queue = ChunkQueue(ChunkOptions(n_action_steps=4))
    asked_at = []
    for step in range(12):
        if queue.is_due(step):
            asked_at.append(step)
            queue.push(chunk(step) + len(asked_at) / 10, step, step)
        action = queue.action(step)
        assert action is not None
        assert action[0] == pytest.approx(step + len(asked_at) / 10)
    assert asked_at == [0, 4, 8]


def test_a_late_chunk_is_bridged_then_the_robot_has_no_action() -> None:
    queue = ChunkQueue(ChunkOptions(n_action_steps=3, n_late_steps=2))
    queue.push(chunk(0), 0, 0)
    assert [queue.action(step) is not None for step in range(7)] == [True] * 5 + [False] * 2


def test_stale_and_overtaken_chunks_are_discarded() -> None:
    queue = ChunkQueue(ChunkOptions(n_action_steps=3))
    assert not queue.push(chunk(0), 0, 3)
    assert queue.push(chunk(5), 5, 6)
    assert not queue.push(chunk(4), 4, 6)
    action = queue.action(6)
    assert action is not None
    assert action[0] == 6
    queue.clear()
    assert queue.action(6) is None
    assert queue.is_due(6)


def test_linear_blending_goes_from_the_running_to_the_new_chunk() -> None:
    queue = ChunkQueue(ChunkOptions(n_action_steps=6, n_ahead_steps=2, blending=Blending.LINEAR))
    queue.push(np.zeros((LENGTH, 7), np.float32), 0, 0)
    queue.push(np.ones((LENGTH, 7), np.float32), 4, 6)  # steps 6 to 9 are in both
    values = []
    for step in range(6, 10):
        action = queue.action(step)
        assert action is not None
        values.append(float(action[0]))
    assert values == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_ensembling_weighs_older_predictions_a_little_more() -> None:
    queue = ChunkQueue(ChunkOptions(n_action_steps=1, blending=Blending.ENSEMBLE))
    for step in range(3):
        queue.push(np.full((LENGTH, 7), step, np.float32), step, step)
    weights = np.exp(-0.01 * np.arange(3))
    action = queue.action(2)
    assert action is not None
    assert action[0] == pytest.approx(weights @ np.arange(3) / weights.sum())


def test_what_is_left_for_real_time_chunking() -> None:
    queue = ChunkQueue(ChunkOptions(n_action_steps=5, blending=Blending.RTC))
    assert queue.left(0) is None
    queue.push(chunk(0), 0, 0)
    left = queue.left(4)
    assert left is not None
    assert left[:, 0].tolist() == [4, 5, 6, 7, 8, 9]
    assert queue.left(10) is None
