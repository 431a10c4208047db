"""The same store on a real PostgreSQL server, where its programs are installed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from recording_samples import attempt_row, run_row

from dayshift.dataset_export.errors import RecordingError
from dayshift.dataset_export.run_folder import open_run
from dayshift.dataset_export.store import RunStore
from dayshift.dataset_export.tables import AttemptRow, EventRow, ReviewAnswerRow


def find_program(name: str) -> str | None:
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(installed[-1]) if installed else shutil.which(name)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    initdb, pg_ctl = find_program("initdb"), find_program("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("PostgreSQL's programs are not installed")
    folder = tmp_path_factory.mktemp("postgresql")
    user = None
    if os.geteuid() == 0:  # the server refuses to run as root
        try:
            user = pwd.getpwnam("postgres").pw_uid
        except KeyError:
            pytest.skip("no user postgres to run the server as")
        os.chown(folder, user, -1)
        for parent in folder.parents[:3]:
            parent.chmod(0o755)

    def run(*command: object) -> None:
        subprocess.run([str(part) for part in command], check=True, capture_output=True, user=user)

    data = folder / "data"
    run(initdb, "-D", data, "-U", "postgres", "-A", "trust")
    options = f"-k {folder} -c listen_addresses=''"
    run(pg_ctl, "-D", data, "-w", "-l", folder / "log", "-o", options, "start")
    yield f"postgresql+psycopg://postgres@/postgres?host={folder}"
    run(pg_ctl, "-D", data, "-m", "immediate", "stop")


def test_rows_are_kept_replaced_and_apart_by_run(url: str, tmp_path: Path) -> None:
    with RunStore(url, "run-1") as one, RunStore(url, "run-2") as two:
        one.save(run_row("run-1"), attempt_row("run-1", "b", 2.0), attempt_row("run-1", "a", 5.0))
        one.save(attempt_row("run-1", "a", 5.0, outcome="failed"))
        two.save(
            run_row("run-2"), EventRow(run_id="run-2", t=1.5, robot="r", kind="log", body={"x": [1, "ü"]})
        )
        answer = ReviewAnswerRow(run_id="run-1", robot="r", shift=1, is_valid=True, steps=[[1, 2, 3]])
        one.save(answer)
        assert one.rows(ReviewAnswerRow) == [answer]
        assert [(row.attempt_id, row.outcome) for row in one.rows(AttemptRow)] == [
            ("b", "done"),
            ("a", "failed"),
        ]
        assert two.rows(AttemptRow) == []
    (tmp_path / "run-2").mkdir()
    with open_run(tmp_path / "run-2", database=url) as run:
        assert [row.body for row in run.events()] == [{"x": [1, "ü"]}]


def test_a_refused_row_is_one_line_without_the_password(url: str) -> None:
    row = attempt_row("run-1", "c", 1.0, outcome=None)
    with (
        RunStore(url.replace("postgres@", "postgres:secret@"), "run-1") as store,
        pytest.raises(RecordingError, match="database postgresql") as caught,
    ):
        store.save(row)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
