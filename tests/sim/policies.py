"""Policies for worker tests: they run in the robot's process, so they are importable by name."""

from __future__ import annotations

import os
import signal
import time

import numpy as np

from dayshift.sim.types import Observation, RolloutSpec
from dayshift.types import DayshiftError


class Idle:
    """Does nothing."""

    def __init__(self, env) -> None: ...

    def reset(self, spec: RolloutSpec) -> None:
        self.spec, self.step = spec, 0

    def act(self, observation: Observation) -> np.ndarray:
        self.step += 1
        self.at_step(self.step)
        return np.array([0, 0, 0, 0, 0, 0, -1], np.float32)

    def at_step(self, step: int) -> None: ...


class Troubled(Idle):
    """Gets into the trouble that the instruction names, at the third control step."""

    def at_step(self, step: int) -> None:
        if step == 3:
            match self.spec.instruction:
                case "abort":
                    os.abort()
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "raise":
                    raise RuntimeError("the policy is\nlost")
                case "disconnect":
                    raise ConnectionResetError("policy server went away")
                case "hang":
                    time.sleep(600)


def no_such_model(env):
    raise DayshiftError("model folder is missing")
