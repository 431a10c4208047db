"""Plans, rollouts and faults follow from the experiment and the attempt's identity alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.experiments.config import Experiment
from dayshift.experiments.plan import build_plan, choose_fault, rollout_spec
from dayshift.planner.jobs import Attempt, JobStep
from dayshift.sim.tasks import list_tasks
from dayshift.types import StepKey


def experiment(**sections) -> Experiment:
    return Experiment.model_validate(sections)


def attempt(shift=1, job=1, step=1, number=1, is_review=False, task="turn on the stove") -> Attempt:
    job_step = JobStep(StepKey(shift, job, step), task)
    return Attempt(
        attempt_id="a", robot="robot-1", step=job_step, number=number, is_review=is_review, instruction=task
    )


@settings(deadline=None)
@given(seed=st.integers(0, 1000), shape=st.tuples(*[st.integers(1, 4)] * 3), robot=st.integers(1, 3))
def test_a_drawn_plan_has_its_shape_and_draws_every_task_equally_often(seed, shape, robot):
    num_shifts, num_jobs, num_steps = shape
    plan = experiment(
        seed=seed, plan={"num_shifts": num_shifts, "jobs_per_shift": num_jobs, "steps_per_job": num_steps}
    )
    shifts = build_plan(plan, robot)
    keys = [step.key for shift in shifts for step in shift.steps]
    assert keys == [
        StepKey(s, j, k)
        for s in range(1, num_shifts + 1)
        for j in range(1, num_jobs + 1)
        for k in range(1, num_steps + 1)
    ]
    counts = Counter(step.task for shift in shifts for step in shift.steps)
    num_tasks = len(list_tasks())
    assert set(counts) <= {task.sentence for task in list_tasks()}
    assert max(counts.values()) <= -(-len(keys) // num_tasks)
    assert shifts == build_plan(plan, robot)


def test_plans_differ_between_robots_and_seeds():
    plans = [build_plan(experiment(seed=seed), robot) for seed in (0, 1) for robot in (1, 2)]
    assert len({tuple(step.task for shift in plan for step in shift.steps) for plan in plans}) == 4


def test_a_written_plan_is_taken_as_it_is_with_liberos_sentences():
    (shift,) = build_plan(
        experiment(plan={"shifts": [[["turn_on_the_stove"], ["put the bowl on the plate"]]]}), 2
    )
    assert [(str(step.key), step.task) for step in shift.steps] == [
        ("1.1.1", "turn on the stove"),
        ("1.2.1", "put the bowl on the plate"),
    ]


def test_attempts_at_a_step_start_from_initial_states_of_their_own():
    config = experiment(rules={"max_attempts": 3}, sim={"num_init_states": 10})
    specs = [
        rollout_spec(config, 1, attempt(number=number, is_review=is_review))
        for is_review in (False, True)
        for number in (1, 2, 3)
    ]
    assert len({spec.init_state_id for spec in specs}) == 6
    assert len({spec.seed for spec in specs}) == 6
    assert all(0 <= spec.init_state_id < 10 for spec in specs)
    assert specs[0] == rollout_spec(config, 1, attempt())
    assert specs[0].seed != rollout_spec(config, 2, attempt()).seed
    assert specs[0].seed != rollout_spec(config, 1, attempt(step=2)).seed


@pytest.mark.parametrize(
    ("fault", "tried", "holds"),
    [
        ({}, attempt(), True),
        ({"shift": 2}, attempt(shift=2, job=3), True),
        ({"shift": 2}, attempt(shift=1), False),
        ({"job": 2}, attempt(job=1), False),
        ({"step": 2}, attempt(step=1), False),
        ({"task": "turn_on_the_stove"}, attempt(), True),
        ({"task": "put the bowl on the plate"}, attempt(), False),
        ({"attempts": (1, 3)}, attempt(number=3), True),
        ({"attempts": (1, 3)}, attempt(number=2), False),
        ({"robot": 1}, attempt(), True),
        ({"robot": 2}, attempt(), False),
        ({}, attempt(is_review=True), True),
        ({"in_reviews": False}, attempt(is_review=True), False),
        ({"in_reviews": False}, attempt(is_review=False), True),
    ],
)
def test_a_fault_holds_for_the_attempts_it_names(fault, tried, holds):
    faults = experiment(faults=[{"kind": "push", **fault}]).faults
    assert (choose_fault(faults, 0, 1, tried) is not None) == holds


def test_the_first_fault_that_fits_acts_with_the_strength_that_was_asked():
    faults = experiment(
        faults=[{"kind": "push", "shift": 2}, {"kind": "short_budget", "strength": 0.2, "at_step": 7}]
    ).faults
    chosen = choose_fault(faults, 0, 1, attempt(shift=1))
    assert chosen is not None
    assert (chosen.kind, chosen.strength, chosen.at_step) == ("short_budget", 0.2, 7)


def test_a_fault_with_a_probability_hits_steps_and_not_attempts():
    faults = experiment(faults=[{"kind": "push", "probability": 0.3}]).faults

    def is_hit(seed: int, job: int, number: int) -> bool:
        return choose_fault(faults, seed, 1, attempt(job=job, number=number)) is not None

    hits = [is_hit(seed, job, 1) for seed in range(40) for job in range(1, 10)]
    assert 0.2 < sum(hits) / len(hits) < 0.4
    assert hits == [is_hit(seed, job, 2) for seed in range(40) for job in range(1, 10)]
