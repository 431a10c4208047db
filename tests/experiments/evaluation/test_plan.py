"""Which episodes, from which states, with which words."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dayshift.experiments.evaluation.plan import Episode, EvaluationPlan, Instructions, task_numbers
from dayshift.experiments.evaluation.records import EpisodeRecord, EvaluationFolder
from dayshift.experiments.evaluation.tables import compare, summarize
from dayshift.experiments.yaml_tree import ConfigError
from dayshift.sim.tasks import SUITES, UnknownTaskError, list_tasks, load_init_states, max_steps_of
from dayshift.types import Outcome

PLAN = EvaluationPlan(policy="expert", suite="libero_goal", tasks=(0, 7), num_trials=3, max_steps=300)


def record(task: int, trial: int, outcome: Outcome, steps: int | None = None) -> EpisodeRecord:
    spec = PLAN.rollout_spec(Episode(task=task, trial=trial, n_action_steps=steps))
    return EpisodeRecord(
        task=task,
        task_name=f"task_{task}",
        trial=trial,
        n_action_steps=steps,
        init_state_id=spec.init_state_id,
        seed=spec.seed,
        instruction=spec.instruction,
        outcome=outcome,
        num_control_steps=100 + trial,
        wall_s=1.0,
        detail="",
        num_infra_retries=0,
        policy_report={},
    )


def test_trials_start_from_consecutive_initial_states() -> None:
    held_out = replace(PLAN, first_init_state=40, num_trials=10)
    specs = [held_out.rollout_spec(episode) for episode in held_out.episodes()]
    assert {spec.init_state_id for spec in specs} == set(range(40, 50))
    assert len({(spec.task, spec.init_state_id, spec.seed) for spec in specs}) == 20
    again = replace(held_out, policy="another", n_action_steps=(5,))
    assert [again.rollout_spec(episode) for episode in again.episodes()] == specs  # paired


def test_further_trials_begin_again_at_the_first_initial_state_with_another_seed() -> None:
    once = replace(PLAN, first_init_state=40, num_trials=10)
    thrice = replace(once, num_init_states=10, num_trials=30)
    specs = [thrice.rollout_spec(episode) for episode in thrice.episodes()]
    assert specs[:20] == [once.rollout_spec(episode) for episode in once.episodes()]
    next_seed = replace(once, seed=1)
    assert specs[20:40] == [next_seed.rollout_spec(episode) for episode in next_seed.episodes()]
    assert len({(spec.task, spec.init_state_id, spec.seed) for spec in specs}) == 60
    assert list(thrice.init_states_of(0)) == list(once.init_states_of(0)) == list(range(40, 50))
    assert list(replace(thrice, num_trials=4).init_states_of(0)) == [40, 41, 42, 43]


def test_starts_of_a_run_are_each_met_as_often_as_asked() -> None:
    plan = replace(PLAN, starts=((0, 12), (7, 3), (7, 31)), num_trials=2)
    specs = [plan.rollout_spec(episode) for episode in plan.episodes()]
    tasks = list_tasks("libero_goal")
    assert Counter((spec.task, spec.init_state_id) for spec in specs) == {
        (tasks[0].name_in_suite, 12): 2,
        (tasks[7].name_in_suite, 3): 2,
        (tasks[7].name_in_suite, 31): 2,
    }
    assert len({(spec.task, spec.init_state_id, spec.seed) for spec in specs}) == 6
    assert len(set(plan.episodes())) == 6


def test_arms_of_n_action_steps_have_the_same_episodes() -> None:
    curve = replace(PLAN, n_action_steps=(1, 5))
    episodes = curve.episodes()
    assert len(episodes) == len(set(episodes)) == 12
    assert [e.n_action_steps for e in episodes] == [1] * 6 + [5] * 6


def test_shuffled_instructions_are_never_the_tasks_own() -> None:
    shuffled = replace(PLAN, tasks=tuple(range(10)), num_trials=1, instructions=Instructions.SHUFFLED)
    tasks = list_tasks("libero_goal")
    told = [shuffled.rollout_spec(episode).instruction for episode in shuffled.episodes()]
    assert sorted(told) == sorted(task.sentence for task in tasks)
    assert all(text != task.sentence for text, task in zip(told, tasks, strict=True))


def test_tasks_by_number_and_sentence() -> None:
    assert task_numbers("libero_goal", None) == tuple(range(10))
    assert task_numbers("libero_goal", "7, turn on the stove,0") == (7, 0)
    with pytest.raises(UnknownTaskError, match="did you mean"):
        task_numbers("libero_goal", "turn on the stoves")


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_has_tasks_states_and_a_step_limit(suite: str) -> None:
    task = list_tasks(suite)[0]
    assert task.bddl_path.is_file()
    assert len(load_init_states(task)) >= 10
    assert max_steps_of(suite) in (220, 280, 300, 400, 520)


def test_libero_pro_changes_the_sentence() -> None:
    own, perturbed = (list_tasks(suite)[0].sentence for suite in ("libero_goal", "libero_goal_lan"))
    assert own == "open the middle drawer of the cabinet"
    assert perturbed != own
    assert task_numbers("libero_goal_lan", perturbed) == (0,)
    assert "bottom drawer" in list_tasks("libero_goal_task")[0].sentence


def test_a_folder_survives_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path / "eval")
    folder.create(PLAN)
    folder.append(record(0, 0, Outcome.DONE), [])
    folder.append(record(7, 0, Outcome.FAILED), [])
    lines = (folder.path / "episodes.jsonl").read_bytes()
    (folder.path / "episodes.jsonl").write_bytes(lines + lines[:25])
    assert [r.task for r in folder.records()] == [0, 7]
    folder.drop_half_line()
    folder.append(record(0, 1, Outcome.INFRA), [])
    assert [r.outcome for r in folder.records()] == [Outcome.DONE, Outcome.FAILED, Outcome.INFRA]
    assert folder.plan() == PLAN
    with pytest.raises(ConfigError, match="--resume"):
        folder.create(PLAN)


def test_infra_failures_are_counted_apart() -> None:
    records = [
        record(0, 0, Outcome.DONE),
        record(0, 1, Outcome.FAILED),
        record(0, 2, Outcome.INFRA),
        record(7, 0, Outcome.DONE),
    ]
    (arm,) = summarize(PLAN, records)["arms"]
    assert (arm["num_done"], arm["num_episodes"], arm["num_infra"]) == (2, 3, 1)
    assert arm["success_rate"] == pytest.approx(2 / 3)
    assert arm["mean_steps_done"] == 100
    assert [task["num_episodes"] for task in arm["tasks"]] == [2, 1]


def test_evaluations_are_compared_on_what_both_have(tmp_path: Path) -> None:
    first, second = EvaluationFolder(tmp_path / "a"), EvaluationFolder(tmp_path / "b")
    first.create(PLAN)
    second.create(replace(PLAN, policy="another"))
    for trial, (outcome, other) in enumerate(
        [(Outcome.DONE, Outcome.FAILED), (Outcome.DONE, Outcome.DONE), (Outcome.FAILED, Outcome.INFRA)]
    ):
        first.append(record(0, trial, outcome), [])
        second.append(record(0, trial, other), [])
    first.append(record(7, 0, Outcome.DONE), [])
    test = compare(first, second)
    assert msgspec.to_builtins(test) == {
        "both": 1,
        "only_first": 1,
        "only_second": 0,
        "neither": 0,
        "p_value": 1.0,
    }
    third = EvaluationFolder(tmp_path / "c")
    third.create(replace(PLAN, max_steps=100))
    with pytest.raises(ConfigError, match="max_steps differs: 300 and 100"):
        compare(first, third)
