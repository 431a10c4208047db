"""Results: one run's, several side by side, and sums over seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from dayshift.dataset_export.store import RunStore
from dayshift.dataset_export.tables import RunRow
from dayshift.engine.api import FinishReason, TokenLedger
from dayshift.experiments import cli
from dayshift.experiments.folders import RunFolder, create_run_folders, open_run_folders
from dayshift.experiments.loading import load_arms
from dayshift.experiments.records import DatabaseStore
from dayshift.experiments.results import compute_results, open_rows, pool_seeds, print_table, read_results
from dayshift.experiments.yaml_tree import ConfigError
from dayshift.planner.jobs import JobStep
from dayshift.planner.records import Exchange, ShiftHours, StepRecord, StepState
from dayshift.types import DayshiftError, StepKey

PLAN = "plan: {num_shifts: 1, jobs_per_shift: 1, steps_per_job: 2}\n"


def make_runs(tmp_path: Path, text: str) -> tuple[RunFolder, ...]:
    (tmp_path / "x.yaml").write_text(PLAN + text)
    return create_run_folders(tmp_path / "runs", load_arms(tmp_path / "x.yaml"))[1]


def record(
    rows: RunStore, *, num_done: int, tokens_per_call: int, num_calls: int, is_over: bool = True
) -> None:
    store = DatabaseStore(rows)
    for number in (1, 2):
        state = StepState.DONE if number <= num_done else StepState.GIVEN_UP
        step = JobStep(StepKey(1, 1, number), "turn on the stove")
        store.save_step(StepRecord(robot="robot-1", step=step, is_review=False, state=state))
    for index in range(1, num_calls + 1):
        store.add_exchange(
            Exchange(
                robot="robot-1", index=index, shift=1, is_review=False, step=None, num_attempts=0,
                is_repair=False, at=1.0, message="", reply="", finish_reason=FinishReason.STOP,
                ledger=TokenLedger(computed=tokens_per_call, recalled=3),
            )
        )  # fmt: skip
    end_s = 9.0 if is_over else None
    store.save_hours(ShiftHours(robot="robot-1", shift=1, is_review=True, start_s=8.0, end_s=end_s))


def test_results_come_from_the_records(tmp_path):
    (run,) = make_runs(tmp_path, "seed: 5")
    with open_rows(run) as rows:
        record(rows, num_done=1, tokens_per_call=100, num_calls=2)
        results = compute_results(run, rows)
    assert read_results(run) == results
    expected = {
        "run_dir": str(run.path), "label": "", "is_finished": True, "planner_model": "default",
        "planner_memory": "recall_kv", "seed": 5, "steps_total": 2, "steps_completed": 1, "given_up": 1,
        "redone": 0, "reviews": 0, "review_answers_correct": 0, "false_redo": 0, "planner_calls": 2,
        "prompt_tokens_computed_per_call": 100.0, "recalled_tokens": 6, "run_s": 9.0,
    }  # fmt: skip
    assert {key: results[key] for key in expected} == expected
    assert results["simulator"] == {"policy": "scripted_expert", "max_steps": 300}


def test_a_renamed_folder_has_the_results_of_its_run(tmp_path, monkeypatch):
    (run,) = make_runs(tmp_path, "seed: 5")
    with open_rows(run) as rows:
        record(rows, num_done=1, tokens_per_call=100, num_calls=2)
        rows.save(
            RunRow(
                run_id=rows.run_id, name="x", created_at="2026-11-29T12:00:00+00:00", fps=20, config_yaml="",
                git_revision=None, versions={}, seeds={},
            )
        )  # fmt: skip
    renamed = run.path.rename(tmp_path / "best run")
    monkeypatch.chdir(renamed)
    for path in (renamed, Path()):
        (found,) = open_run_folders(path)
        assert read_results(found)["steps_completed"] == 1


def test_a_run_is_not_reported_twice(tmp_path, monkeypatch, capfd):
    (run,) = make_runs(tmp_path, "seed: 5")
    monkeypatch.chdir(run.path)
    assert cli.run(["report", ".", str(run.path)]) == 2
    assert capfd.readouterr().err == f"dayshift: report: {run.path} is named twice; allowed: each run once\n"


def test_runs_that_differ_in_their_seed_only_are_summed(tmp_path, capsys):
    runs = make_runs(tmp_path, "matrix: {planner.memory: [full, off], seed: [1, 2]}")
    results = []
    for run, num_done, tokens, num_calls in zip(
        runs, (2, 1, 0, 0), (10, 40, 1, 1), (1, 2, 1, 1), strict=True
    ):
        with open_rows(run) as rows:
            record(rows, num_done=num_done, tokens_per_call=tokens, num_calls=num_calls)
            results.append(compute_results(run, rows))
    full, off = pool_seeds(runs, results)
    assert (full["planner_memory"], full["seeds"], off["planner_memory"]) == ("full", [1, 2], "off")
    assert (full["steps_completed"], full["steps_total"], full["given_up"]) == (3, 4, 1)
    assert full["prompt_tokens_computed_per_call"] == pytest.approx((10 + 2 * 40) / 3)
    assert pool_seeds(runs[:1], results[:1]) == []
    print_table(runs, results)
    assert "3 of 4" in capsys.readouterr().out


def test_an_unfinished_run_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (run,) = make_runs(tmp_path, "")
    with open_rows(run) as rows:
        record(rows, num_done=1, tokens_per_call=1, num_calls=1, is_over=False)
    print_table((run,), [read_results(run)])
    assert f"not finished: dayshift run --resume {run.path}" in capsys.readouterr().out


def test_folders_open_again_as_the_runs_they_were_made_for(tmp_path):
    runs = make_runs(tmp_path, "matrix: {seed: [1, 2]}")
    parent = runs[0].path.parent
    assert [(run.path, run.arm.label, run.arm.experiment) for run in open_run_folders(parent)] == [
        (run.path, run.arm.label, run.arm.experiment) for run in runs
    ]
    assert open_run_folders(runs[1].path)[0].arm.experiment == runs[1].arm.experiment
    assert len({run.path.name for run in runs}) == 2
    assert all(run.path.name.startswith(f"{parent.name}.seed-") for run in runs)


def test_what_is_no_run_is_said_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"found neither config\.yaml nor arms\.json"):
        open_run_folders(tmp_path)
    (run,) = make_runs(tmp_path, "")
    with pytest.raises(DayshiftError, match="nothing is recorded yet"):
        read_results(run)
    assert not (run.path / "run.db").exists()


def test_two_runs_in_the_same_second_get_folders_of_their_own(tmp_path):
    assert len({make_runs(tmp_path, "")[0].path for _ in range(3)}) == 3


def test_a_runs_dir_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match="--runs-dir"):
        make_runs(tmp_path, "")
