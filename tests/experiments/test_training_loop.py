"""The loop from a trained policy to its paired table, at toy size, and what the table says."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from dayshift.experiments.evaluation.plan import EvaluationPlan
from dayshift.experiments.evaluation.records import EpisodeRecord, EvaluationFolder
from dayshift.experiments.training_loop import ARMS, print_table, write_episodes
from dayshift.policy.training.dataset import open_dataset
from dayshift.types import Outcome

TASK = "turn on the stove"
PLAN = EvaluationPlan(policy="a", suite="libero_goal", tasks=(7,), num_trials=8, max_steps=20)


def _evaluation(path: Path, outcomes: str) -> EvaluationFolder:
    """`outcomes` has a character for each trial, "1" if it was done."""
    folder = EvaluationFolder(path)
    folder.create(PLAN)
    for trial, is_done in reversed(list(enumerate(outcomes))):
        record = EpisodeRecord(
            task=7,
            task_name="turn_on_the_stove",
            trial=trial,
            n_action_steps=None,
            init_state_id=trial,
            seed=trial,
            instruction=TASK,
            outcome=Outcome.DONE if is_done == "1" else Outcome.FAILED,
            num_control_steps=10 + trial,
            wall_s=1.0,
            detail="",
            num_infra_retries=0,
            policy_report={},
        )
        folder.append(record, [])
    return folder


def test_the_arms_are_compared_pair_by_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = {"before": "00000011", "control": "00000110", "operation": "11111110"}
    evaluations = {arm: _evaluation(tmp_path / arm, outcomes[arm]) for arm in ARMS}
    print_table("initial states met", evaluations)
    cells = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    rows = {name.strip(): [cell.strip() for cell in others] for name, *others in cells}
    assert [rows[arm][0] for arm in ARMS] == ["2/8", "2/8", "7/8"]
    assert rows["before"][2:] == ["1", "1", "1"]  # one is better, one worse: p = 1
    assert rows["operation"][2:] == ["5", "0", "0.0625"]

    write_episodes({"met": evaluations}, tmp_path / "episodes.csv")
    with (tmp_path / "episodes.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 3 * PLAN.num_trials
    assert lines[8] == {
        "states": "met",
        "policy": "control",
        "task": "7",
        "instruction": TASK,
        "init_state_id": "0",
        "seed": "0",
        "outcome": "failed",
        "num_control_steps": "10",
    }


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_loop_runs_whole_and_then_does_nothing_twice(tmp_path: Path) -> None:
    def run(module: str, *arguments: str) -> str:
        command = [sys.executable, "-m", f"dayshift.{module}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    small = ("--device", "cpu", "--batch-size", "2", "--parallel", "1", "--steps", "2")
    run(
        "policy.training",
        *("base", *small, "--size", "nano", "--image-stride", "50"),
        *("--tasks", TASK, "--episodes", "1", "--trials", "0"),
    )
    loop = (
        *("base", "loop", *small, "--image-stride", "50", "--interventions", "2"),
        *("--tasks", "7", "--trials", "1", "--max-steps", "10"),
        *("--set", f"plan.tasks=[{TASK}]", "--set", "plan.num_shifts=1", "--set", "plan.jobs_per_shift=1"),
        *("--set", "plan.steps_per_job=1", "--set", "rules.max_attempts=1", "--set", "sim.max_steps=20"),
    )
    printed = run("experiments.training_loop", *loop)
    assert all(arm in printed for arm in ARMS)
    interventions = open_dataset(tmp_path / "loop" / "interventions" / "dataset")
    assert interventions.num_episodes >= 2
    assert not (tmp_path / "loop" / "dataset").exists()  # an untrained policy does nothing well
    assert printed.endswith(run("experiments.training_loop", *loop))  # without what lerobot says of training
    assert len(list((tmp_path / "loop" / "runs").iterdir())) == 1
