"""Runs a simulator until it is ended from outside; prints the id of the robot's process."""

import contextlib

from dayshift.policy.replay import ReplayPolicy
from dayshift.sim.types import RolloutSpec
from dayshift.sim.worker import RobotSimulator


def make_policy(env) -> ReplayPolicy:
    return ReplayPolicy([])


def main() -> None:
    spec = RolloutSpec(task="turn on the stove", init_state_id=0, seed=0, max_steps=100_000, instruction="")
    with RobotSimulator(make_policy) as simulator:
        is_announced = False

        def announce(frame) -> None:
            nonlocal is_announced
            if not is_announced:
                print(simulator.process_id, flush=True)
                is_announced = True

        with contextlib.suppress(KeyboardInterrupt):
            simulator.run(spec, lambda *_: None, announce)


if __name__ == "__main__":
    main()
