from __future__ import annotations

import numpy as np
import pytest

from dayshift.sim.faults import DEFAULT_STRENGTH, SLIP_AFTER_STEPS, Disturbance, UnknownFaultError
from dayshift.sim.scene import SETTLE_ACTION
from dayshift.sim.tasks import find_task
from dayshift.sim.types import Fault

CLOSE = np.array([0, 0, 0, 0, 0, 0, 1], np.float32)


def run_with(scene, fault: Fault | None, actions) -> None:
    disturbance = Disturbance(fault)
    for step, action in enumerate(actions):
        disturbance.disturb_physics(step, scene, action)
        scene.step(action)


def opening(scene) -> float:
    return float(scene.data.joint("gripper0_finger_joint1").qpos[0])


def test_an_unknown_fault_is_one_line_with_what_is_allowed() -> None:
    with pytest.raises(UnknownFaultError, match=r"'quake'; allowed: gripper_slip, push, blocked_view"):
        Disturbance(Fault(kind="quake"))


@pytest.mark.parametrize(
    ("fault", "num_steps"),
    [
        (None, 300),
        (Fault(kind="push"), 300),
        (Fault(kind="short_budget", strength=0.5), 150),
        (Fault(kind="short_budget"), int(300 * DEFAULT_STRENGTH["short_budget"])),
        (Fault(kind="short_budget", strength=0.0), 1),
    ],
)
def test_only_a_short_budget_shortens_the_attempt(fault, num_steps) -> None:
    assert Disturbance(fault).budget(300) == num_steps


def test_a_slipping_gripper_opens_while_it_is_told_to_close(env) -> None:
    env.scene.reset(0, seed=0)
    run_with(env.scene, Fault(kind="gripper_slip"), [CLOSE] * (SLIP_AFTER_STEPS - 2))
    assert opening(env.scene) < 0.005  # at first it closes like any other
    env.scene.reset(0, seed=0)
    run_with(env.scene, Fault(kind="gripper_slip"), [CLOSE] * (SLIP_AFTER_STEPS + 15))
    assert opening(env.scene) > 0.03
    run_with(env.scene, None, [CLOSE] * 5)
    env.scene.reset(0, seed=0)
    run_with(env.scene, None, [CLOSE] * (SLIP_AFTER_STEPS + 15))
    assert opening(env.scene) < 0.005  # nothing is left of the fault after a reset


def test_a_push_moves_what_the_goal_wants_moved_and_nothing_else(env) -> None:
    env.scene.set_task(find_task("put the wine bottle on the rack"))
    env.scene.reset(0, seed=0)
    before = {
        name: env.scene.data.body(f"{name}_main").xpos.copy() for name in ("wine_bottle_1", "cream_cheese_1")
    }
    run_with(env.scene, Fault(kind="push", at_step=0, num_steps=5), [SETTLE_ACTION] * 5)
    moved = {
        name: np.linalg.norm(env.scene.data.body(f"{name}_main").xpos - at) for name, at in before.items()
    }
    assert moved["wine_bottle_1"] > 0.02
    assert moved["cream_cheese_1"] < 0.002


@pytest.mark.parametrize(
    ("sentence", "joint", "opened"),
    [
        ("open the middle drawer of the cabinet", "wooden_cabinet_1_middle_level", -0.1),
        ("turn on the stove", "flat_stove_1_button", 1.0),
    ],
)
def test_a_push_shuts_a_drawer_and_turns_a_knob_back(env, sentence, joint, opened) -> None:
    env.scene.set_task(find_task(sentence))
    env.scene.reset(0, seed=0)
    env.scene.data.joint(joint).qpos[0] = opened
    run_with(env.scene, Fault(kind="push"), [SETTLE_ACTION] * 10)
    assert abs(env.scene.data.joint(joint).qpos[0]) < 0.2 * abs(opened)


def test_outside_its_window_a_fault_does_nothing(env) -> None:
    env.scene.set_task(find_task("put the bowl on the plate"))
    states = []
    for fault in (None, Fault(kind="push", at_step=5), Fault(kind="push", at_step=0, num_steps=0)):
        env.scene.reset(0, seed=0)
        run_with(env.scene, fault, [SETTLE_ACTION] * 5)
        states.append(env.scene.state())
    np.testing.assert_array_equal(states[0], states[1])
    np.testing.assert_array_equal(states[0], states[2])
