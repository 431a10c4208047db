from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dayshift.sim.libero_setup import load_mujoco
from dayshift.sim.scene import SETTLE_ACTION
from dayshift.sim.tasks import find_task, list_tasks, load_init_states

MAX_DRIFT_M = 0.002


def random_actions(seed: int, num_actions: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    actions = [rng.uniform(-1, 1, 7).astype(np.float32) for _ in range(num_actions)]
    for action in actions[::4]:
        action[3:6] = 0  # then the controller keeps its last orientation goal
    return actions


def test_the_ten_goal_tasks_differ_in_nothing_but_the_goal(env) -> None:
    assert all(env.scene.can_serve(task) for task in list_tasks())
    assert not env.scene.can_serve(find_task("libero_spatial/0"))


def test_a_reset_depends_on_task_init_state_and_seed_only(env) -> None:
    scene = env.scene
    scene.set_task(find_task(3))
    scene.reset(4, seed=11)
    first, poses = scene.state(), scene.fixture_poses()
    scene.force_fingers_open(5.0)
    for action in random_actions(seed=1, num_actions=12):
        scene.step(action)
    scene.reset(4, seed=11)
    np.testing.assert_array_equal(scene.state(), first)
    assert scene.fixture_poses() == poses
    scene.reset(4, seed=12)
    assert scene.fixture_poses() != poses


def test_the_global_random_state_is_left_alone(env) -> None:
    before = np.random.get_state(legacy=False)["state"]["key"].copy()
    env.scene.reset(0, seed=3)
    np.testing.assert_array_equal(np.random.get_state(legacy=False)["state"]["key"], before)


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), cut=st.integers(0, 14))
def test_any_recorded_state_continues_bit_by_bit(env, seed: int, cut: int) -> None:
    scene = env.scene
    actions = random_actions(seed, num_actions=15)
    scene.set_task(find_task(8))
    scene.reset(seed % 50, seed)
    states, poses = [], scene.fixture_poses()
    for action in actions:
        states.append(scene.state())
        scene.step(action)
    end = scene.state()

    scene.reset(0, seed=999)  # somewhere else, with other fixture poses
    scene.restore(poses, states[cut])
    for action, state in zip(actions[cut:], states[cut:], strict=True):
        np.testing.assert_array_equal(scene.state(), state)
        scene.step(action)
    np.testing.assert_array_equal(scene.state(), end)


@pytest.fixture(scope="module")
def plain_libero():
    """LIBERO's own environment for the last task, started by LIBERO's evaluation protocol."""
    load_mujoco()
    from libero.libero.envs.env_wrapper import ControlEnv

    task = find_task(9)
    plain = ControlEnv(bddl_file_name=str(task.bddl_path), use_camera_obs=False, has_offscreen_renderer=False)
    plain.seed(17)
    plain.reset()
    plain.set_init_state(load_init_states(task)[6])
    for _ in range(10):
        plain.step(np.array([0.0] * 6 + [-1.0]))
    return plain


def test_a_swapped_task_has_the_model_that_libero_compiles_for_it(env, plain_libero) -> None:
    env.scene.set_task(find_task(9))
    env.scene.reset(6, seed=17)
    expected = plain_libero.sim.model._model
    fields = [name for name in dir(expected) if isinstance(getattr(expected, name), np.ndarray)]
    assert {"geom_pos", "mesh_vert", "tex_data", "body_pos", "actuator_forcerange"} <= set(fields)
    for field in fields:
        np.testing.assert_array_equal(getattr(env.scene.model, field), getattr(expected, field), field)
    assert env.scene.goal == (("on", "wine_bottle_1", "wine_rack_1_top_region"),)


def test_physics_and_robot_state_are_those_of_plain_libero(env, plain_libero) -> None:
    from robosuite.utils.transform_utils import quat2axisangle

    env.scene.set_task(find_task(9))
    env.scene.reset(6, seed=17)
    for action in random_actions(seed=2, num_actions=10):
        plain_libero.step(action.astype(np.float64))
        env.scene.step(action)
    data = plain_libero.sim.data
    np.testing.assert_array_equal(data.qpos, env.scene.data.qpos)
    np.testing.assert_array_equal(data.qvel, env.scene.data.qvel)

    load_mujoco().mj_kinematics(plain_libero.sim.model._model, data._data)
    observation = plain_libero.env._get_observations(force_update=True)
    expected = np.concatenate(
        [
            observation["robot0_eef_pos"],
            quat2axisangle(observation["robot0_eef_quat"]),
            observation["robot0_gripper_qpos"],
        ]
    )
    np.testing.assert_array_equal(env.scene.robot_state(), expected.astype(np.float32))


@pytest.mark.parametrize("task", list_tasks(), ids=lambda task: task.name)
def test_initial_states_settle(env, task) -> None:
    """With other MuJoCo versions objects jump or slide away here."""
    env.scene.set_task(task)
    env.scene.reset(0, seed=0)
    objects = ("akita_black_bowl_1", "cream_cheese_1", "wine_bottle_1", "plate_1")
    settled = {name: env.scene.data.body(f"{name}_main").xpos.copy() for name in objects}
    for _ in range(20):
        env.scene.step(SETTLE_ACTION)
    for name, position in settled.items():
        drift = np.linalg.norm(env.scene.data.body(f"{name}_main").xpos - position)
        assert drift < MAX_DRIFT_M, f"{name} moved {drift * 1000:.1f} mm in a second"
    assert not env.scene.is_success()
