"""Border types of the simulator. numpy and the standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dayshift.types import Outcome

if TYPE_CHECKING:
    from dayshift.sim.libero_env import LiberoEnv

Camera = str  # "agentview" or "wrist"
CAMERAS: tuple[Camera, ...] = ("agentview", "wrist")
CONTROL_HZ = 20  # LIBERO's control rate, and the frame rate of every recording

Action = NDArray[np.float32]  # (7,): delta xyz, delta axis-angle, gripper (-1 open, 1 closed), in [-1, 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a policy may see at a control step.

    `state` is float32 (8,): end-effector position (m), axis-angle orientation (rad), two finger
    joint positions (m). `images` are uint8 (height, width, 3), RGB, rotated by 180 degrees as
    LIBERO policies expect; empty when the cameras were not rendered for this step.
    """

    state: NDArray[np.float32]
    instruction: str
    images: Mapping[Camera, NDArray[np.uint8]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One recorded control step: the state and images *before* the action, and the action's effect.

    `sim_state` is MuJoCo's full state, float64 (n,) (time, qpos, qvel, and what else a re-render
    or a continuation needs), so that any camera image can be rendered later, exactly. `images`
    holds the frames rendered live (as in `Observation`), maybe none.
    """

    index: int
    sim_state: NDArray[np.float64]
    robot_state: NDArray[np.float32]  # (8,), as Observation.state
    action: Action
    reward: float
    success: bool  # LIBERO's success test after the action
    images: Mapping[Camera, NDArray[np.uint8]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A disturbance that makes an attempt harder in physics. Positions in metres, forces in newton.

    kind: "gripper_slip" (the fingers lose their force while holding), "push" (a force on an object),
    "blocked_view" (the cameras see black), "short_budget" (fewer control steps). `at_step` and
    `num_steps` say when it acts, in control steps; `strength` is the force, or the fraction of the step
    budget (None: the kind's default, which makes the scripted expert fail; see faults.py).
    """

    kind: str
    at_step: int = 0
    num_steps: int = 10_000
    strength: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """One rollout, fully determined: same spec, same policy, same versions, same trajectory."""

    task: str  # LIBERO task name or its sentence
    init_state_id: int
    seed: int  # fixture poses (cabinet, stove, rack) come from it
    max_steps: int
    instruction: str  # what the policy is told
    fault: Fault | None = None
    camera_hz: float = 0.0  # how often live frames are rendered; 0: never
    cameras: tuple[Camera, ...] = CAMERAS
    image_size: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStart:
    """What a re-render or a replay needs and what the spec alone does not say."""

    fixture_poses: Mapping[str, tuple[float, ...]]  # body -> position (3) + quaternion (4, wxyz)
    sim_state: NDArray[np.float64]  # state after settling, before the first action
    protocol: Mapping[str, str]  # settle steps, image rotation, versions, render backend …


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """How a rollout ended. INFRA: the simulator broke; `detail` says what, in one line."""

    outcome: Outcome
    num_control_steps: int
    wall_s: float
    detail: str = ""
    policy_report: Mapping[str, float] = field(default_factory=dict)  # of a ReportingPolicy


@runtime_checkable
class Policy(Protocol):
    """Chooses actions for one rollout at a time. Made in the simulator's process."""

    def reset(self, spec: RolloutSpec) -> None: ...

    def act(self, observation: Observation) -> Action: ...


@runtime_checkable
class VisionPolicy(Policy, Protocol):
    """A policy that looks at the cameras, perhaps only when it starts a new action chunk."""

    def needs_images(self) -> bool:
        """Whether the next `act` wants `Observation.images`, whatever `RolloutSpec.camera_hz` says."""
        ...


@runtime_checkable
class ReportingPolicy(Policy, Protocol):
    """A policy that counts what it did in a rollout."""

    def report(self) -> Mapping[str, float]:
        """Numbers by name, of the rollout since `reset`."""
        ...


OnStart = Callable[[RolloutSpec, RolloutStart], None]
OnFrame = Callable[[Frame], None]

# Makes the policy in the simulator's process; the scripted expert needs the environment, others ignore it.
PolicyFactory = Callable[["LiberoEnv"], Policy]
