"""The scripted expert as a policy: one action per control step out of a task's script."""

from __future__ import annotations

import numpy as np

from dayshift.policy.expert.hand import Hand, Motion
from dayshift.policy.expert.scripts import SCRIPTS
from dayshift.sim.libero_env import LiberoEnv
from dayshift.sim.tasks import find_task
from dayshift.sim.types import Action, Observation, RolloutSpec
from dayshift.types import DayshiftError


class ScriptedExpert:
    """Knows where everything is (it reads the simulator of `env`) and how each task is done.

    It follows the task in `RolloutSpec.task`, whatever the instruction says. When its script is over without
    success it holds still: what failed has failed.
    """

    def __init__(self, env: LiberoEnv) -> None:
        self._env = env

    def reset(self, spec: RolloutSpec) -> None:
        task = find_task(spec.task)
        if task.name not in SCRIPTS:
            raise DayshiftError(
                f"the scripted expert has no script for {task.name}; it knows LIBERO-Goal only"
            )
        self._hand = Hand(self._env.scene)
        self._motion: Motion = SCRIPTS[task.name](self._hand)
        self.is_over = False
        """Whether the script has ended, and `act` holds still."""

    def act(self, observation: Observation) -> Action:
        action = next(self._motion, None)
        if action is None:
            self.is_over = True
            action = self._hand.hold()
        return np.clip(action, -1.0, 1.0).astype(np.float32)
