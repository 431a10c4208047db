"""The expert takes over from a policy: demonstrations from where the policy itself has gone.

A policy fails where no demonstration has been. Here it acts for a while; then, in a moment in which its hand
touches nothing, the expert begins its script, and only the expert's actions are kept (HG-DAgger,
arXiv:1810.02890). With nothing in the hand, what the expert does first is right wherever the policy was.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dayshift.policy.smolvla.policy import ActionRequest, SmolVLAPolicy
from dayshift.policy.training.demonstrations import Demonstration, DisturbedExpert, cut
from dayshift.sim.libero_env import LiberoEnv
from dayshift.sim.rollout import rollout
from dayshift.sim.types import CAMERAS, Action, Frame, Observation, RolloutSpec, RolloutStart
from dayshift.types import Outcome

_LATEST_STEP = 150  # at which the expert may take over, if the hand is empty
_HAND, _ROBOT = "gripper0_", "robot0_"  # of names of bodies


class LocalPolicy:
    """A checkpoint that acts in the simulator's own process, on its CPU. A `VisionPolicy`."""

    def __init__(self, checkpoint: Path, *, n_action_steps: int | None = None) -> None:
        self._policy = SmolVLAPolicy.load(checkpoint)
        self._n_action_steps = n_action_steps or self._policy.config.policy.n_action_steps
        self._chunk: list[Action] = []

    def reset(self, spec: RolloutSpec) -> None:
        self._chunk = []
        self._noise = torch.Generator().manual_seed(spec.seed)

    def needs_images(self) -> bool:
        return not self._chunk

    def act(self, observation: Observation) -> Action:
        if not self._chunk:
            config = self._policy.config
            images = {
                name: observation.images[camera] for name, camera in zip(config.cameras, CAMERAS, strict=True)
            }
            request = ActionRequest(
                images=images, state=observation.state, instruction=observation.instruction
            )
            shape = (1, config.policy.chunk_size, config.policy.max_action_dim)
            noise = torch.randn(shape, generator=self._noise)
            self._chunk = list(self._policy.act([request], noise)[0].actions[: self._n_action_steps])
        return np.clip(self._chunk.pop(0), -1.0, 1.0)


class Intervention(DisturbedExpert):
    """The policy, then the expert. A `VisionPolicy`; `labels` are None while the policy acts."""

    def __init__(self, env: LiberoEnv, policy: LocalPolicy) -> None:
        super().__init__(env, is_disturbed=False)
        self._policy = policy

    def reset(self, spec: RolloutSpec) -> None:
        super().reset(spec)
        self._policy.reset(spec)
        self.has_taken_over = False
        self._earliest_step = int(self._rng.integers(0, _LATEST_STEP))

    def needs_images(self) -> bool:
        return not self.has_taken_over and self._policy.needs_images()

    def act(self, observation: Observation) -> Action:
        is_due = len(self.labels) >= self._earliest_step
        if not self.has_taken_over and is_due and not touches_something(self._env):
            self.has_taken_over = True
            self._begin()
        if self.has_taken_over:
            return super().act(observation)
        self.labels.append(None)
        return self._policy.act(observation)


def intervene(env: LiberoEnv, policy: LocalPolicy, spec: RolloutSpec) -> list[Demonstration]:
    """One attempt; nothing if the expert was not needed, or failed as well."""
    actor = Intervention(env, policy)
    starts: list[RolloutStart] = []
    frames: list[Frame] = []
    result = rollout(env, actor, spec, lambda _, start: starts.append(start), frames.append)
    if result.outcome is not Outcome.DONE:
        return []
    return cut(env, spec, starts[0], frames, actor.labels)


def touches_something(env: LiberoEnv) -> bool:
    """Whether hand or fingers are in contact with anything but the robot itself."""
    model, contact = env.scene.model, env.scene.data.contact
    for pair in contact.geom:
        names = [model.body(model.geom_bodyid[geom]).name for geom in pair]
        hands = [name.startswith(_HAND) for name in names]
        if any(hands) and not all(
            own or name.startswith(_ROBOT) for own, name in zip(hands, names, strict=True)
        ):
            return True
    return False
