"""Real MuJoCo, our engine, the default planner: a step is given up, remembered in the review, and redone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dayshift.dataset_export.run_folder import open_run

GIVEN_UP_AND_REDONE = """
plan: {shifts: [[[turn on the stove]]]}
planner: {window: 768}
rules: {max_attempts: 1}
sim: {camera_hz: 2, image_size: 64}
faults: [{kind: short_budget, in_reviews: false}]
"""


@pytest.fixture
def experiment(tmp_path: Path) -> str:
    (tmp_path / "one.yaml").write_text(GIVEN_UP_AND_REDONE, encoding="utf-8")
    return "one.yaml"


def test_a_given_up_step_is_remembered_and_redone(dayshift, experiment, tmp_path):
    ended = dayshift("run", experiment, "--json")
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    results = json.loads(ended.stdout)
    expected = {
        "steps_total": 1, "steps_completed": 0, "given_up": 1, "retried": 1, "redone": 1, "reviews": 1,
        "review_answers_correct": 1, "false_redo": 0, "attempts": 2, "infra_attempts": 0,
        "planner_calls": 5, "refused_replies": 0, "planner_model": "default", "is_finished": True,
    }  # fmt: skip
    assert {key: results[key] for key in expected} == expected
    assert 0 < results["prompt_tokens_computed_per_call"] <= 120
    assert results["simulator"]["mujoco"].startswith("3.3.")
    with open_run(tmp_path / results["run_dir"]) as run:
        assert [(a.attempt_id, a.outcome) for a in run.attempts()] == [
            ("robot-1-1.1.1-w1", "failed"),
            ("robot-1-1.1.1-r1", "done"),
        ]
        assert [set(each.cameras) for each in run.recorded_attempts()] == [{"agentview", "wrist"}] * 2
        assert run.exchanges()[2].recall_start_s == run.shifts()[0].start_s


def test_a_killed_run_goes_on_in_its_session_once_that_is_undamaged(terminal, experiment, tmp_path):
    run = terminal("run", experiment)
    run.wait_for("step 1.1.1 given up")
    processes = run.descendants()
    assert len(processes) >= 4, "simulator, recorder, engine server and engine core are running"
    run.kill()
    assert run.still_alive(processes) == set()
    (folder,) = (tmp_path / "runs").iterdir()
    (session,) = (folder / "engine" / "sessions").glob("*.session")
    written = session.read_bytes()

    session.write_bytes(written[:100] + bytes(100) + written[200:])
    refused = terminal("run", "--resume", str(folder))
    assert refused.end() == (1, "")
    assert re.search(rf"^dayshift: .*{re.escape(session.name)}", refused.lines[-1])

    session.write_bytes(written)
    code, out = terminal("run", "--resume", str(folder), "--json").end()
    assert code == 0
    results = json.loads(out)
    assert (results["redone"], results["attempts"], results["review_answers_correct"]) == (1, 2, 1)
