"""The expert's eyes and hand: poses out of the simulator, and motions as generators of actions.

A motion yields one action per control step and reads the simulator again after each, so that it is
closed-loop: `yield from hand.move_to(…)` ends when the hand is there, or after its time.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.spatial.transform import Rotation

from dayshift.sim.scene import Scene

Vector = NDArray[np.float64]  # (3,), metres, world frame
Motion = Iterator[NDArray[np.float64]]  # actions (7,)

# OSC_POSE: an action of 1 asks for 5 cm or 0.5 rad within one control step.
ACTION_METRES = 0.05
ACTION_RADIANS = 0.5
GAIN = 2.0  # proportional; the controller itself lags behind

OPEN, CLOSED = -1.0, 1.0
# The hand pointing down, fingers along the world's y axis.
DOWN = Rotation.from_matrix([[0, 1, 0], [1, 0, 0], [0, 0, -1]])

METRES_PER_RADIAN = 0.1  # weighs turning against moving
PROGRESS_M = 5e-4
BLOCKED_AFTER_STEPS = 12  # without progress: something is in the way

MIN_CLOSING_STEPS = 4
MAX_CLOSING_STEPS = 22  # a thin rim needs about 14
OPENING_STEPS = 6
FINGERS_STOPPED_M = 2e-4  # per control step


class Hand:
    """One robot hand. Remembers only what it wants the gripper to do."""

    def __init__(self, scene: Scene) -> None:
        self._model, self._data = scene.model, scene.data
        self._gripper = OPEN

    # ---- eyes ----

    @property
    def position(self) -> Vector:
        return self.site("gripper0_grip_site")

    @property
    def rotation(self) -> Rotation:
        return Rotation.from_matrix(self._data.site("gripper0_grip_site").xmat.reshape(3, 3))

    def site(self, name: str) -> Vector:
        return self._data.site(name).xpos.copy()

    def body(self, name: str) -> Vector:
        return self._data.body(name).xpos.copy()

    def body_rotation(self, name: str) -> Rotation:
        return Rotation.from_matrix(self._data.body(name).xmat.reshape(3, 3))

    def joint(self, name: str) -> float:
        return float(self._data.joint(name).qpos[0])

    # ---- motions ----

    def hold(self) -> NDArray[np.float64]:
        """The action that moves nothing."""
        return np.array([0, 0, 0, 0, 0, 0, self._gripper])

    def towards(self, position: Vector, rotation: Rotation, max_speed: float = 1.0) -> NDArray[np.float64]:
        """The action of one control step towards a pose; the direction is kept when it is clipped."""
        move = GAIN * (position - self.position) / ACTION_METRES
        turn = GAIN * (rotation * self.rotation.inv()).as_rotvec() / ACTION_RADIANS
        return np.concatenate([_limit(move, max_speed), _limit(turn, 1.0), [self._gripper]])

    def move_to(
        self,
        position: ArrayLike,
        rotation: Rotation = DOWN,
        *,
        tolerance: float = 0.008,
        angle_tolerance: float = 0.08,
        max_speed: float = 1.0,
        max_steps: int = 60,
    ) -> Motion:
        """Go to a pose, within `tolerance` metres and `angle_tolerance` radians, or until blocked."""
        goal = np.asarray(position, dtype=np.float64)
        least_error, num_stalled = np.inf, 0
        for _ in range(max_steps):
            distance = float(np.linalg.norm(goal - self.position))
            angle = (rotation * self.rotation.inv()).magnitude()
            if distance < tolerance and angle < angle_tolerance:
                return
            error = distance + METRES_PER_RADIAN * angle
            num_stalled = 0 if error < least_error - PROGRESS_M else num_stalled + 1
            least_error = min(error, least_error)
            if num_stalled == BLOCKED_AFTER_STEPS:
                return
            yield self.towards(goal, rotation, max_speed)

    def move_by(self, offset: ArrayLike, rotation: Rotation = DOWN, *, tolerance: float = 0.008) -> Motion:
        """Go to a pose relative to where the hand is now."""
        yield from self.move_to(self.position + np.asarray(offset), rotation, tolerance=tolerance)

    def lift_to(self, height: float, rotation: Rotation = DOWN, *, tolerance: float = 0.02) -> Motion:
        """Go straight up (or down) to a height above the floor."""
        x, y, _ = self.position
        yield from self.move_to([x, y, height], rotation, tolerance=tolerance)

    def close(self) -> Motion:
        """Close the fingers until they stop, on something or on each other."""
        self._gripper = CLOSED
        here, last_opening = self.position, np.inf
        for step in range(MAX_CLOSING_STEPS):
            yield self._stay_at(here)
            opening = self.joint("gripper0_finger_joint1")
            if step >= MIN_CLOSING_STEPS and abs(opening - last_opening) < FINGERS_STOPPED_M:
                return
            last_opening = opening

    def open(self, num_steps: int = OPENING_STEPS) -> Motion:
        """Open the fingers."""
        self._gripper = OPEN
        here = self.position
        for _ in range(num_steps):
            yield self._stay_at(here)

    def wait(self, num_steps: int) -> Motion:
        """Do nothing, until things have settled."""
        for _ in range(num_steps):
            yield self.hold()

    def _stay_at(self, position: Vector) -> NDArray[np.float64]:
        move = GAIN * (position - self.position) / ACTION_METRES
        return np.concatenate([move, np.zeros(3), [self._gripper]])


def _limit(vector: Vector, largest: float) -> Vector:
    size = np.abs(vector).max()
    return vector if size <= largest else vector * largest / size
