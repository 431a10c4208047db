from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dayshift.policy.replay import ReplayPolicy
from dayshift.sim.types import Observation, RolloutSpec

SPEC = RolloutSpec(task="turn on the stove", init_state_id=0, seed=0, max_steps=9, instruction="")
OBSERVATION = Observation(state=np.zeros(8, np.float32), instruction="")


@given(st.lists(st.lists(st.floats(-1, 1, width=32), min_size=7, max_size=7), min_size=1, max_size=5))
def test_it_plays_the_actions_then_holds_still_and_starts_again_at_a_reset(rows) -> None:
    actions = [np.array(row, np.float32) for row in rows]
    policy = ReplayPolicy(actions)
    for _ in range(2):
        policy.reset(SPEC)
        for action in actions:
            np.testing.assert_array_equal(policy.act(OBSERVATION), action)
        np.testing.assert_array_equal(policy.act(OBSERVATION), [0, 0, 0, 0, 0, 0, actions[-1][6]])


def test_without_actions_it_waits_with_an_open_gripper() -> None:
    policy = ReplayPolicy([])
    policy.reset(SPEC)
    np.testing.assert_array_equal(policy.act(OBSERVATION), [0, 0, 0, 0, 0, 0, -1])
