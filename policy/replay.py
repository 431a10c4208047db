"""A policy that plays recorded actions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dayshift.sim.types import Action, Observation, RolloutSpec

HOLD: Action = np.array([0, 0, 0, 0, 0, 0, -1], dtype=np.float32)


class ReplayPolicy:
    """Plays the actions of one recorded rollout, then holds still with the gripper as it was."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = [np.asarray(action, dtype=np.float32) for action in actions]
        self._next = 0

    def reset(self, spec: RolloutSpec) -> None:
        self._next = 0

    def act(self, observation: Observation) -> Action:
        if self._next < len(self._actions):
            self._next += 1
            return self._actions[self._next - 1]
        hold = HOLD.copy()
        if self._actions:
            hold[6] = self._actions[-1][6]
        return hold
