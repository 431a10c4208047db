from __future__ import annotations

import numpy as np
import pytest

from dayshift.policy.evaluate_expert import evaluate_task
from dayshift.policy.expert import ScriptedExpert
from dayshift.policy.expert.scripts import SCRIPTS
from dayshift.policy.replay import ReplayPolicy
from dayshift.sim.rollout import rollout
from dayshift.sim.tasks import find_task, list_tasks
from dayshift.sim.types import Fault, Frame, RolloutSpec
from dayshift.types import DayshiftError, Outcome

SPEC = RolloutSpec(
    task="put the bowl on the plate", init_state_id=3, seed=3, max_steps=300, instruction="anything"
)


def test_it_has_a_script_for_each_task_of_the_suite() -> None:
    assert set(SCRIPTS) == {task.name for task in list_tasks()}


def test_another_suite_is_refused_in_one_line(env) -> None:
    spec = RolloutSpec(task="libero_spatial/0", init_state_id=0, seed=0, max_steps=300, instruction="")
    with pytest.raises(DayshiftError, match="LIBERO-Goal"):
        ScriptedExpert(env).reset(spec)


@pytest.mark.parametrize(
    "sentence",
    ["open the middle drawer of the cabinet", "turn on the stove", "put the cream cheese in the bowl"],
)
def test_it_solves_a_drawer_a_knob_and_an_object(env, sentence) -> None:
    score = evaluate_task(env, find_task(sentence), [0])
    assert (score.num_done, score.num_attempts) == (1, 1)
    assert score.max_steps < 150


def test_its_recorded_actions_replayed_do_the_same(env) -> None:
    frames: list[Frame] = []
    result = rollout(env, ScriptedExpert(env), SPEC, lambda *_: None, frames.append)
    assert result.outcome is Outcome.DONE
    assert frames[-1].success
    assert not any(frame.success for frame in frames[:-1])

    replayed: list[Frame] = []
    replay = ReplayPolicy([frame.action for frame in frames])
    again = rollout(env, replay, SPEC, lambda *_: None, replayed.append)
    assert (again.outcome, again.num_control_steps) == (Outcome.DONE, result.num_control_steps)
    for frame, copy in zip(frames, replayed, strict=True):
        np.testing.assert_array_equal(frame.sim_state, copy.sim_state)


@pytest.mark.parametrize(
    ("sentence", "fault"),
    [
        ("put the bowl on the plate", Fault(kind="gripper_slip")),
        ("put the bowl on the plate", Fault(kind="push")),
        ("turn on the stove", Fault(kind="push")),
        ("put the bowl on the plate", Fault(kind="short_budget")),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else value,
)
def test_a_fault_makes_it_fail_and_leaves_nothing_behind(env, sentence, fault) -> None:
    task = find_task(sentence)
    assert evaluate_task(env, task, [0], fault=fault).num_done == 0
    assert evaluate_task(env, task, [0]).num_done == 1


def test_a_fault_outside_its_window_changes_nothing(env) -> None:
    late = Fault(kind="push", at_step=290)
    plain, faulted = [], []
    for fault, frames in ((None, plain), (late, faulted)):
        spec = RolloutSpec(
            task=SPEC.task, init_state_id=0, seed=0, max_steps=300, instruction="", fault=fault
        )
        rollout(env, ScriptedExpert(env), spec, lambda *_: None, frames.append)
    assert len(plain) == len(faulted) < 290
    np.testing.assert_array_equal(plain[-1].sim_state, faulted[-1].sim_state)


@pytest.mark.slow
@pytest.mark.parametrize("task", list_tasks(), ids=lambda task: task.name)
def test_it_succeeds_on_ten_initial_states(env, task) -> None:
    score = evaluate_task(env, task, range(10))
    assert score.num_done >= 9, score.failed_init_state_ids
