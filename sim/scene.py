"""One compiled LIBERO scene: its physics, its complete state, its success test.

The tasks of LIBERO-Goal share one scene (robot, objects, fixtures, regions) and differ in the goal
only, so a scene is compiled once (seconds) and tasks are swapped in it (milliseconds).
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dayshift.sim.libero_setup import load_mujoco
from dayshift.sim.tasks import LiberoTask, load_init_states
from dayshift.sim.types import CONTROL_HZ, Action

NUM_SETTLE_STEPS = 10
SETTLE_ACTION: Action = np.array([0, 0, 0, 0, 0, 0, -1], dtype=np.float32)

# What makes a task out of a scene: all else in the parsed problem must be equal to share the scene.
_TASK_FIELDS = frozenset({"goal_state", "obj_of_interest", "language_instruction", "language"})


class Scene:
    """A LIBERO scene in MuJoCo, serving one task at a time.

    `model` and `data` are MuJoCo's own; read what you need, change physics through the methods.
    """

    def __init__(self, task: LiberoTask) -> None:
        mujoco = load_mujoco()
        with warnings.catch_warnings(action="ignore"):  # of robosuite and LIBERO's other dependencies
            from libero.libero.envs.env_wrapper import ControlEnv

        self._mujoco = mujoco
        self._control_env = ControlEnv(
            bddl_file_name=str(task.bddl_path),
            use_camera_obs=False,
            has_renderer=False,
            has_offscreen_renderer=False,  # cameras are rendered by render.py, from recorded states
            hard_reset=False,
            ignore_done=True,
            control_freq=CONTROL_HZ,
        )
        self._domain = self._control_env.env
        self._robot = self._domain.robots[0]
        self.model: Any = self._domain.sim.model._model
        self.data: Any = self._domain.sim.data._data
        self.task = task
        self._state_fields = int(
            mujoco.mjtState.mjSTATE_FULLPHYSICS.value  # time, qpos, qvel, actuators
            | mujoco.mjtState.mjSTATE_WARMSTART.value  # the solver starts from it
            | mujoco.mjtState.mjSTATE_CTRL.value  # seen by the first forward pass of a control step
        )
        self._num_mujoco_numbers = mujoco.mj_stateSize(self.model, self._state_fields)
        self._finger_actuator_ids = list(self._robot._ref_joint_gripper_actuator_indexes)
        self._nominal_finger_forces = self.model.actuator_forcerange[self._finger_actuator_ids].copy()
        for name in self._domain.observation_names:  # read from `data` instead, at no cost per substep
            self._domain.modify_observable(name, "active", False)
            self._domain.modify_observable(name, "enabled", False)
        _release_compiler_memory()

    # ---- task ----

    def can_serve(self, task: LiberoTask) -> bool:
        """Whether `task` differs from this scene's task in nothing but the goal."""
        return _scene_part(_parse_problem(task)) == _scene_part(self._domain.parsed_problem)

    def set_task(self, task: LiberoTask) -> None:
        """Swap the goal; `can_serve(task)` must hold."""
        self._domain.parsed_problem = _parse_problem(task)
        self._domain.obj_of_interest = self._domain.parsed_problem["obj_of_interest"]
        self.task = task

    @property
    def goal(self) -> tuple[tuple[str, ...], ...]:
        """LIBERO's goal predicates, for example (("on", "plate_1", "main_table_stove_front_region"),)."""
        return tuple(tuple(predicate) for predicate in self._domain.parsed_problem["goal_state"])

    def is_success(self) -> bool:
        """LIBERO's success test on the present state."""
        return bool(self._control_env.check_success())

    # ---- physics ----

    def reset(self, init_state_id: int, seed: int) -> None:
        """Put the scene into an initial state and let it settle. `seed` places the fixtures."""
        self._soft_reset(seed)
        self._domain.sim.set_state_from_flattened(load_init_states(self.task)[init_state_id])
        self._mujoco.mj_forward(self.model, self.data)
        self._domain._post_process()
        for _ in range(NUM_SETTLE_STEPS):
            self.step(SETTLE_ACTION)

    def restore(self, fixture_poses: Mapping[str, tuple[float, ...]], sim_state: NDArray[np.float64]) -> None:
        """Put the scene into a recorded state, ready to continue exactly as the recorded one did."""
        self._soft_reset(seed=0)
        for fixture, pose in fixture_poses.items():
            body_id = self._domain.obj_body_id[fixture]
            self.model.body_pos[body_id] = pose[:3]
            self.model.body_quat[body_id] = pose[3:]
        self.set_state(sim_state)

    def step(self, action: Action) -> bool:
        """Run one control step (1/20 s); returns LIBERO's success test after it."""
        _, _, is_success, _ = self._control_env.step(np.asarray(action, dtype=np.float64))
        # MuJoCo leaves poses one substep behind the joints. (robosuite's own observations are 24 behind:
        # it samples them after the first of a control step's 25 substeps.)
        self._mujoco.mj_kinematics(self.model, self.data)
        return bool(is_success)

    def _soft_reset(self, seed: int) -> None:
        self.release_fingers()
        with _numpy_seed(seed):  # LIBERO samples fixture poses with numpy's global generator
            self._control_env.reset()
        self._robot.gripper.current_action = np.zeros(self._robot.gripper.dof)  # LIBERO keeps the last one

    # ---- state ----

    def state(self) -> NDArray[np.float64]:
        """All that a re-render or an exact continuation needs, float64 (n,).

        MuJoCo's physics state, warm start and controls, then the controller's memory: the gripper's
        ramp (2) and the orientation goal (9), which stays when an action turns nothing.
        """
        numbers = np.empty(self._num_mujoco_numbers)
        self._mujoco.mj_getState(self.model, self.data, numbers, self._state_fields)
        gripper, controller = self._robot.gripper, self._robot.controller
        return np.concatenate([numbers, gripper.current_action, controller.goal_ori.ravel()])

    def set_state(self, sim_state: NDArray[np.float64]) -> None:
        """Inverse of `state`, within one reset of the scene (same fixture poses)."""
        numbers, memory = np.split(sim_state, [self._num_mujoco_numbers])
        self._mujoco.mj_setState(self.model, self.data, numbers, self._state_fields)
        self._robot.gripper.current_action = memory[:2].copy()
        self._robot.controller.goal_ori = memory[2:].reshape(3, 3).copy()
        self._robot.controller.new_update = True
        # Positions and contacts only: a full forward pass would change the solver's warm start.
        self._mujoco.mj_fwdPosition(self.model, self.data)
        self._domain._post_process()

    def fixture_poses(self) -> dict[str, tuple[float, ...]]:
        """Fixture name -> position (3, metres) and quaternion (4, wxyz)."""
        body_ids = {name: self._domain.obj_body_id[name] for name in self._domain.fixtures_dict}
        return {
            name: tuple(map(float, (*self.model.body_pos[body_id], *self.model.body_quat[body_id])))
            for name, body_id in body_ids.items()
        }

    def robot_state(self) -> NDArray[np.float32]:
        """float32 (8,): end-effector position, axis-angle orientation, finger joints; LIBERO's convention."""
        from robosuite.utils.transform_utils import quat2axisangle

        position = self.data.site_xpos[self._robot.eef_site_id]
        hand_id = self._domain.sim.model.body_name2id(self._robot.robot_model.eef_name)
        quaternion = np.roll(self.data.xquat[hand_id], -1)  # wxyz -> xyzw
        fingers = self.data.qpos[self._robot._ref_gripper_joint_pos_indexes]
        return np.concatenate([position, quat2axisangle(quaternion), fingers]).astype(np.float32)

    # ---- disturbances ----

    def force_fingers_open(self, newtons: float) -> None:
        """Replace the fingers' own force by one that opens them, until `release_fingers` or a reset."""
        forces = np.array([[newtons, newtons], [-newtons, -newtons]])  # they open in opposite directions
        self.model.actuator_forcerange[self._finger_actuator_ids] = forces

    def release_fingers(self) -> None:
        """Give the fingers their own force back."""
        self.model.actuator_forcerange[self._finger_actuator_ids] = self._nominal_finger_forces

    def goal_joint_id(self) -> int:
        """The joint of the thing that the goal wants moved: an object's, a drawer's, a knob's."""
        moved = self.goal[0][1]
        owner = self._domain.object_sites_dict.get(moved) or self._domain.get_object(moved)
        return self.model.joint(owner.joints[-1]).id

    def apply_wrench(self, body_id: int, force: NDArray[np.float64], torque: NDArray[np.float64]) -> None:
        """Force (N) and torque (Nm), world frame, on a body until changed or a reset."""
        self.data.xfrc_applied[body_id] = np.concatenate([force, torque])


def _parse_problem(task: LiberoTask) -> dict[str, Any]:
    from libero.libero.envs.bddl_utils import robosuite_parse_problem

    return robosuite_parse_problem(str(task.bddl_path))


def _scene_part(problem: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in problem.items() if field not in _TASK_FIELDS}


@contextlib.contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    saved = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(saved)


def _release_compiler_memory() -> None:
    """Return what MuJoCo keeps of the compiled scene's sources, more than half of a simulator's memory.

    That is its asset cache, and the last loaded model description (replaced here by an empty one).
    """
    mujoco = load_mujoco()
    mujoco.mj_clearCache(mujoco.mj_getCache())
    mujoco.MjModel.from_xml_string("<mujoco/>")
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
