"""LIBERO's tasks as a `gymnasium.Env`, with LIBERO's evaluation protocol pinned and printable."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from dayshift.sim.libero_setup import gl_backend, library_versions
from dayshift.sim.render import RENDER_FLAGS, CameraRenderer, Images
from dayshift.sim.scene import NUM_SETTLE_STEPS, Scene
from dayshift.sim.tasks import LiberoTask, find_task, load_init_states
from dayshift.sim.types import CONTROL_HZ, Action, Camera, RolloutStart
from dayshift.types import DayshiftError

MAX_STEPS = 300  # LIBERO-Goal's protocol
NUM_FIXTURE_SEEDS = 2**32  # as many as numpy's global generator takes

EnvObservation = dict[str, NDArray[Any]]  # "state" and one entry per rendered camera


class LiberoEnv(gymnasium.Env[EnvObservation, Action]):
    """One robot and one LIBERO task at a time; changing to a task of the same scene costs milliseconds.

    `reset(seed=, options={"task": …, "init_state_id": …, "max_steps": …})`: the initial state is a function
    of task and init_state_id; the seed places the fixtures (cabinet, stove, rack) within a centimetre.
    Options that are left out keep their last value. Observation: "state", as in
    `dayshift.sim.types.Observation`, and the images of `cameras`, rendered at every step (a rollout
    leaves `cameras` empty and calls `render_cameras` when images are wanted).
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": CONTROL_HZ}  # noqa: RUF012 (gymnasium's name)

    def __init__(
        self,
        task: str | int = 0,
        *,
        cameras: tuple[Camera, ...] = (),
        image_size: int = 256,
        max_steps: int = MAX_STEPS,
        render_mode: str | None = None,
    ) -> None:
        self.task: LiberoTask = find_task(task)
        self.cameras = cameras
        self.max_steps = max_steps
        self.render_mode = render_mode
        self.scene = Scene(self.task)
        self.image_size = image_size
        self.seed = 0
        self.init_state_id = 0
        self._renderer: CameraRenderer | None = None
        self._num_steps = 0
        self._is_running = False
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)
        image_space = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        fields: dict[str, spaces.Space[Any]] = dict.fromkeys(cameras, image_space)
        fields["state"] = spaces.Box(-10.0, 10.0, (8,), np.float32)  # metres and radians
        self.observation_space: spaces.Space[Any] = spaces.Dict(fields)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[EnvObservation, dict[str, Any]]:
        """Start an attempt: initial state, fixtures placed, scene settled. Raises DayshiftError."""
        super().reset(seed=seed)
        options = options or {}
        self.seed = int(self.np_random.integers(NUM_FIXTURE_SEEDS)) if seed is None else seed
        task = find_task(options.get("task", self.task.name_in_suite))
        self.init_state_id = options.get("init_state_id", self.init_state_id)
        check_start(task, self.init_state_id, self.seed)
        self._set_task(task)
        self.max_steps = options.get("max_steps", self.max_steps)
        self.scene.reset(self.init_state_id, self.seed)
        self._num_steps = 0
        self._is_running = True
        return self._observe(), {"task": self.task.name, "init_state_id": self.init_state_id}

    def step(self, action: Action) -> tuple[EnvObservation, float, bool, bool, dict[str, Any]]:
        """One control step. terminated: LIBERO's success test passed; truncated: out of steps."""
        if not self._is_running:
            raise gymnasium.error.ResetNeeded("step after the end of an attempt: call reset first")
        if not np.all(np.isfinite(action)):
            raise ValueError(f"action is not finite: {action}")
        is_success = self.scene.step(action)
        self._num_steps += 1
        truncated = not is_success and self._num_steps >= self.max_steps
        self._is_running = not (is_success or truncated)
        return self._observe(), float(is_success), is_success, truncated, {"is_success": is_success}

    def render_cameras(self, cameras: tuple[Camera, ...], image_size: int | None = None) -> Images:
        """Images of the present state, rotated as `Observation.images`."""
        size = image_size or self.image_size
        if self._renderer is None or self._renderer.image_size != size:
            self._close_renderer()
            self._renderer = CameraRenderer(self.scene, size)
        return self._renderer.render(cameras)

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]
        """The scene as people look at it (upright, not mirrored), uint8 (image_size, image_size, 3)."""
        if self.render_mode is None:
            return None
        return self.render_cameras(("agentview",))["agentview"][:, ::-1]

    def start_record(self) -> RolloutStart:
        """What is needed, beside the spec, to replay or re-render from the present state on."""
        return RolloutStart(
            fixture_poses=self.scene.fixture_poses(),
            sim_state=self.scene.state(),
            protocol=self.protocol(),
        )

    def protocol(self) -> dict[str, str]:
        """Everything that a number measured here depends on; print it with the number."""
        return {
            "suite": self.task.suite,
            "control_hz": str(CONTROL_HZ),
            "max_steps": str(self.max_steps),
            "settle_steps": str(NUM_SETTLE_STEPS),
            "init_state": "f(task, init_state_id)",
            "fixture_poses": "from the seed",
            "success": "LIBERO's test, first control step that passes",
            "controller": "OSC_POSE, deltas",
            "observation_time": "end of the control step (robosuite itself samples at its first substep)",
            "images": "rotated by 180 degrees",
            "rendering": RENDER_FLAGS,
            "gl_backend": gl_backend(),
            **library_versions(),
        }

    def close(self) -> None:
        """Free the OpenGL context."""
        self._close_renderer()

    def _set_task(self, task: LiberoTask) -> None:
        if not self.scene.can_serve(task):
            self._close_renderer()
            self.scene = Scene(task)
        self.scene.set_task(task)
        self.task = task

    def _observe(self) -> EnvObservation:
        images = self.render_cameras(self.cameras) if self.cameras else {}
        return {"state": self.scene.robot_state(), **images}

    def _close_renderer(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


def check_start(task: LiberoTask, init_state_id: int, seed: int) -> None:
    """Raise DayshiftError if no attempt at `task` can start like this. Light: loads no simulator."""
    num_states = len(load_init_states(task))
    if not 0 <= init_state_id < num_states:
        raise DayshiftError(
            f"init_state_id {init_state_id} of {task.name}: allowed are 0 to {num_states - 1}"
        )
    if not 0 <= seed < NUM_FIXTURE_SEEDS:
        raise DayshiftError(f"seed {seed} of {task.name}: allowed: 0 to {NUM_FIXTURE_SEEDS - 1}")
