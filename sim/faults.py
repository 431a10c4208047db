"""Disturbances that make an attempt fail honestly: forces and state in MuJoCo, never the outcome.

| kind         | what happens in the window [at_step, at_step + num_steps)             | strength |
|--------------|------------------------------------------------------------------------|----------|
| gripper_slip | whenever the fingers have been closing for SLIP_AFTER_STEPS, they are   | N, each  |
|              | forced open instead of pressing, until the robot opens them            | finger   |
| push         | the thing that the goal wants moved is pushed: an object along         | N        |
|              | PUSH_DIRECTION at up to PUSH_SPEED (before it is grasped: the fingers    |          |
|              | hold 20 N), a drawer shut, a knob back, those with FIXTURE_FACTOR         |          |
| blocked_view | the cameras see black                                                   | unused   |
| short_budget | the attempt has only this fraction of its control steps                 | fraction |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from dayshift.sim.types import Action, Fault
from dayshift.types import DayshiftError

if TYPE_CHECKING:
    from dayshift.sim.render import Images
    from dayshift.sim.scene import Scene

# With these the scripted expert fails, acting from the start: gripper_slip at all LIBERO-Goal tasks but
# the stove's knob (which turns without being pressed), push and short_budget at all.
DEFAULT_STRENGTH: Mapping[str, float] = {
    "gripper_slip": 5.0,
    "push": 0.3,
    "blocked_view": 1.0,
    "short_budget": 0.15,
}
SLIP_AFTER_STEPS = 18
PUSH_DIRECTION = np.array([1.0, 0.0, 0.0])  # world frame: away from the robot's base
PUSH_SPEED = 0.5  # m/s; an object that is faster is left alone,
PUSH_REACH_M = 0.6  # and so is one that is beyond the table's edge
FIXTURE_FACTOR = 1000.0  # drawers and knobs weigh 3 kg, objects 5 to 15 g
KNOB_LEVER_M = 0.1


class UnknownFaultError(DayshiftError):
    """No fault has this name."""


class Disturbance:
    """One rollout's fault (or none) at work. Make a new one for each rollout."""

    def __init__(self, fault: Fault | None) -> None:
        if fault is not None and fault.kind not in DEFAULT_STRENGTH:
            raise UnknownFaultError(f"unknown fault {fault.kind!r}; allowed: {', '.join(DEFAULT_STRENGTH)}")
        self._fault = fault
        self._kind = fault.kind if fault is not None else None
        self._strength = 0.0
        if fault is not None:
            self._strength = DEFAULT_STRENGTH[fault.kind] if fault.strength is None else fault.strength
        self._num_closing_steps = 0

    def budget(self, max_steps: int) -> int:
        """Control steps that the attempt really has."""
        return max(1, int(max_steps * self._strength)) if self._kind == "short_budget" else max_steps

    def disturb_images(self, step: int, images: Images) -> Images:
        """The images as the robot sees them at this control step."""
        if self._kind == "blocked_view" and self._is_active(step):
            return {camera: np.zeros_like(image) for camera, image in images.items()}
        return images

    def disturb_physics(self, step: int, scene: Scene, action: Action) -> None:
        """Set the forces for the control step that is about to run with `action`."""
        if self._kind == "gripper_slip":
            self._slip(step, scene, action)
        elif self._kind == "push":
            _push(scene, self._strength if self._is_active(step) else 0.0)

    def _is_active(self, step: int) -> bool:
        fault = self._fault
        return fault is not None and fault.at_step <= step < fault.at_step + fault.num_steps

    def _slip(self, step: int, scene: Scene, action: Action) -> None:
        is_closing = action[6] > 0
        self._num_closing_steps = self._num_closing_steps + 1 if is_closing else 0
        if self._is_active(step) and self._num_closing_steps > SLIP_AFTER_STEPS:
            scene.force_fingers_open(self._strength)
        else:
            scene.release_fingers()


def _push(scene: Scene, newtons: float) -> None:
    model, data, joint_id = scene.model, scene.data, scene.goal_joint_id()
    force, torque = np.zeros(3), np.zeros(3)
    low, high = model.jnt_range[joint_id]
    back = -1.0 if high > -low else 1.0  # towards the closed end of a drawer's or knob's range
    match model.jnt_type[joint_id]:
        case 0:  # free: an object
            first_dof = model.jnt_dofadr[joint_id]
            speed = data.qvel[first_dof : first_dof + 3] @ PUSH_DIRECTION
            way = data.xpos[model.jnt_bodyid[joint_id]] @ PUSH_DIRECTION
            if speed < PUSH_SPEED and way < PUSH_REACH_M:
                force = newtons * PUSH_DIRECTION
        case 2:  # slide: a drawer
            force = newtons * FIXTURE_FACTOR * back * data.xaxis[joint_id]
        case 3:  # hinge: a knob
            torque = newtons * FIXTURE_FACTOR * KNOB_LEVER_M * back * data.xaxis[joint_id]
    scene.apply_wrench(model.jnt_bodyid[joint_id], force, torque)
