from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recording_samples import attempt_row, recording_row, run_row

from dayshift.dataset_export.attempt_files import ATTEMPTS
from dayshift.dataset_export.errors import RecordingError
from dayshift.dataset_export.recorder import Recording
from dayshift.dataset_export.repair import RunRepair, repair_run
from dayshift.dataset_export.run_folder import open_run
from dayshift.dataset_export.store import DATABASE, RunStore, database_url, open_records
from dayshift.dataset_export.tables import (
    FORMAT,
    AttemptRow,
    EventRow,
    ExchangeRow,
    JobStepRow,
    ReviewAnswerRow,
    RobotRow,
    ShiftRow,
)
from dayshift.types import DayshiftError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run-1"
    path.mkdir()
    return path


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
times = st.floats(0, 1e6)
step_lists = st.lists(st.tuples(*[st.integers(1, 99)] * 3).map(list), max_size=4)
steps = st.builds(
    JobStepRow,
    run_id=st.just("run-1"),
    robot=st.sampled_from(["robot-0", "robot-1"]),
    shift=st.integers(1, 3),
    job=st.integers(1, 3),
    step=st.integers(1, 3),
    is_review=st.booleans(),
    task=texts,
    state=st.sampled_from(["pending", "running", "done", "given_up"]),
    num_attempts=st.integers(0, 9),
    num_infra_attempts=st.integers(0, 9),
    reason=st.none() | st.sampled_from(["attempts", "planner"]),
)
exchanges = st.builds(
    ExchangeRow,
    run_id=st.just("run-1"),
    robot=st.sampled_from(["robot-0", "robot-1"]),
    idx=st.integers(1, 5),
    at=times,
    shift=st.integers(1, 3),
    is_review=st.booleans(),
    job=st.none() | st.integers(1, 9),
    step=st.none() | st.integers(1, 9),
    num_attempts=st.integers(0, 3),
    is_repair=st.booleans(),
    message=texts,
    reply=texts,
    finish_reason=st.just("stop"),
    ledger=st.dictionaries(
        st.sampled_from(["computed", "reused", "restore_ms"]), st.integers(0, 9000) | times
    ),
    recall_start_s=st.none() | times,
    recall_end_s=st.none() | times,
    recalled_turns=st.lists(st.integers(0, 99), max_size=5),
    latency_s=times,
    problem=texts,
)
answers = st.builds(
    ReviewAnswerRow,
    run_id=st.just("run-1"),
    robot=st.just("robot-0"),
    shift=st.integers(1, 3),
    is_valid=st.booleans(),
    steps=step_lists,
    refused=step_lists,
    mismatched=step_lists,
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=st.lists(steps | exchanges | answers, max_size=12))
def test_the_last_row_of_each_key_is_read_back_after_reopening(tmp_path_factory, rows: list) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    newest = {}
    with RunStore(database_url(run_dir), "run-1") as store:
        for row in rows:
            store.save(row)
            key = tuple(getattr(row, column.name) for column in type(row).__table__.primary_key)
            newest[type(row), *key] = row
    with RunStore(database_url(run_dir), "run-1") as store:
        for table in (JobStepRow, ExchangeRow, ReviewAnswerRow):
            expected = [
                row for key, row in sorted(newest.items(), key=lambda item: item[0][1:]) if key[0] is table
            ]
            assert store.rows(table) == expected


def test_rows_of_one_save_are_stored_together_or_not_at_all(run_dir: Path) -> None:
    with RunStore(database_url(run_dir), "run-1") as store:
        bad = attempt_row("run-1", "b", 2.0, outcome=None)
        with pytest.raises(RecordingError, match="NOT NULL"):
            store.save(attempt_row("run-1", "a", 1.0), bad)
        assert store.rows(AttemptRow) == []


def test_attempts_come_in_order_of_time_and_are_filtered(run_dir: Path) -> None:
    with RunStore(database_url(run_dir), "run-1") as store:
        store.save(
            attempt_row("run-1", "z", 1.0),
            attempt_row("run-1", "a", 9.0, outcome="failed"),
            attempt_row("run-1", "m", 5.0),
        )
        assert [row.attempt_id for row in store.rows(AttemptRow)] == ["z", "m", "a"]
        assert [row.attempt_id for row in store.rows(AttemptRow, outcome="done")] == ["z", "m"]


def test_two_runs_in_one_database_do_not_see_each_other(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    with RunStore(url, "run-1") as one, RunStore(url, "run-2") as two:
        one.save(run_row("run-1"), attempt_row("run-1", "a", 1.0))
        two.save(run_row("run-2"), attempt_row("run-2", "a", 1.0, outcome="failed"))
        two.delete(AttemptRow)
        assert [row.outcome for row in one.rows(AttemptRow)] == ["done"]
        assert two.rows(AttemptRow) == []
    (tmp_path / "run-2").mkdir()
    with open_run(tmp_path / "run-2", database=url) as run:
        assert run.run.run_id == "run-2"


def test_robots_write_at_once_and_a_reader_sees_whole_commits(run_dir: Path) -> None:
    num_robots, num_exchanges = 4, 15
    with RunStore(database_url(run_dir), "run-1") as store:
        store.save(run_row("run-1"))

        def operate(robot: str) -> None:
            for i in range(1, num_exchanges + 1):
                store.save(
                    ShiftRow(run_id="run-1", robot=robot, shift=i, is_review=False, start_s=float(i)),
                    EventRow(
                        run_id="run-1", t=float(i), robot=robot, kind="shift_started", body={"shift": i}
                    ),
                )

        threads = [threading.Thread(target=operate, args=(f"robot-{i}",)) for i in range(num_robots)]
        for thread in threads:
            thread.start()
        with open_run(run_dir) as run:
            while any(thread.is_alive() for thread in threads):
                num_shifts = len(run.shifts())
                assert len(run.events()) >= num_shifts
        for thread in threads:
            thread.join()
        assert len(store.rows(ShiftRow)) == len(store.rows(EventRow)) == num_robots * num_exchanges


def test_a_run_keeps_what_it_was(run_dir: Path) -> None:
    robot = RobotRow(
        run_id="run-1",
        robot="robot-0",
        kind="live",
        policy="scripted_expert",
        planner_model="planner-13m",
        planner_memory="recall_kv",
    )
    with RunStore(database_url(run_dir), "run-1") as store:
        store.save(run_row("run-1"), robot)
    with open_run(run_dir) as run:
        assert run.run.config_yaml == "name: quickstart\n"
        assert run.run.versions == {"mujoco": "3.3.7"}
        assert run.robots() == [robot]


def test_a_renamed_run_folder_still_opens(run_dir: Path) -> None:
    with RunStore(database_url(run_dir), "run-1") as store:
        store.save(run_row("run-1"))
    renamed = run_dir.rename(run_dir.with_name("best run"))
    with open_run(renamed) as run:
        assert run.run.run_id == "run-1"


def recorded_run(run_dir: Path) -> Path:
    """A run with one attempt that has ended; only its folder is there of its files."""
    recording = Recording(attempt_id="a-1", num_frames=98, num_images={}, num_bytes=1)
    with RunStore(database_url(run_dir), run_dir.name) as store:
        run_id = store.run_id
        store.save(run_row(run_id), attempt_row(run_id, "a-1"), recording_row(run_id, recording))
    (run_dir / ATTEMPTS / "a-1").mkdir(parents=True)
    return run_dir


def test_a_renamed_run_is_repaired_and_gone_on_with_under_its_id(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = recorded_run(run_dir).rename(run_dir.with_name("best run"))
    monkeypatch.chdir(renamed)
    for path in (renamed, Path(), Path("..") / "best run"):
        with open_records(path) as store:
            assert store.run_id == run_dir.name
            assert repair_run(path, store) == RunRepair(removed=(), missing=())
    assert (renamed / ATTEMPTS / "a-1").is_dir()


def test_recorded_attempts_are_never_taken_for_those_of_another_run(run_dir: Path, tmp_path: Path) -> None:
    shared = f"sqlite:///{tmp_path / 'shared.db'}"
    with RunStore(shared, "other") as store:
        store.save(run_row("other"))
    recorded_run(run_dir)
    with pytest.raises(RecordingError, match=rf"holds no run {run_dir.name} \(it has: other\)"):
        open_records(run_dir, shared)
    (run_dir / DATABASE).unlink()
    with pytest.raises(RecordingError, match=rf"holds no run {run_dir.name} \(it has: none\)"):
        open_records(run_dir)
    with open_records(tmp_path / "new run", shared) as store:
        assert store.run_id == "new run"


def test_what_cannot_be_opened_is_explained_in_one_line(run_dir: Path) -> None:
    with pytest.raises(DayshiftError, match=r"no run here \(expected a folder with run.db\)"):
        open_run(run_dir)

    (run_dir / "run.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(DayshiftError, match="file is not a database") as caught:
        open_run(run_dir)
    assert "\n" not in str(caught.value)

    (run_dir / "run.db").unlink()
    with RunStore(database_url(run_dir), "run-1") as store:
        store.save(run_row("run-1", format=FORMAT + 1))
    with pytest.raises(
        DayshiftError, match=f"recorded in format {FORMAT + 1}, this version reads up to {FORMAT}"
    ):
        open_run(run_dir)


def test_the_database_survives_a_writer_that_was_killed_in_a_transaction(run_dir: Path) -> None:
    with RunStore(database_url(run_dir), "run-1") as store:
        store.save(run_row("run-1"), attempt_row("run-1", "a", 1.0))
    connection = sqlite3.connect(run_dir / "run.db")
    connection.execute("DELETE FROM attempts")  # begun, never committed
    with open_run(run_dir) as run:
        assert [row.attempt_id for row in run.attempts()] == ["a"]
    connection.close()
