from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayshift.dataset_export.store import RunStore, database_url
from dayshift.dataset_export.tables import AttemptRow, RunRow
from dayshift.types import DayshiftError
from dayshift.webui.board import Totals, describe_board
from dayshift.webui.run_index import Bars, RunIndex
from tests.webui.made_runs import MadeRun


def test_steps_attempts_and_hours_of_a_made_run(index: RunIndex) -> None:
    assert [row.robot for row in index.robot_rows] == ["robot-1", "robot-2"]
    board = describe_board(index.robot("robot-1"))
    first_shift = [row for row in board["steps"] if row[0] == 1]
    assert [(row[1], row[2], row[3], row[5], row[6]) for row in first_shift] == [
        (1, 1, False, "done", None),
        (1, 2, False, "given_up", "attempts"),
        (1, 2, True, "done", None),
        (2, 1, False, "done", None),
        (2, 2, False, "done", None),
    ]
    tries = [row for row in board["attempts"] if board["steps"][row[1]] == first_shift[1]]
    assert [(row[2], row[3]) for row in tries] == [(1, "failed"), (2, "failed")]
    assert board["ends"][1] == tries[-1][5]  # given up when its last attempt had ended


def test_totals_grow_with_time_to_what_the_records_say(index: RunIndex) -> None:
    totals = Totals.of(index.robots)
    states = [(step.is_review, step.state) for robot in index.robots.values() for step in robot.steps]
    end = totals.at(index.end_s)
    assert end["done"] == states.count((False, "done"))
    assert end["given_up"] == states.count((False, "given_up"))
    assert end["redone"] == states.count((True, "done"))
    assert end["attempts"] == len(index.attempts)
    assert totals.at(-1.0) == {**dict.fromkeys(end, 0), "steps": end["steps"]}


def test_the_log_is_in_order_of_time_and_complete(index: RunIndex) -> None:
    times = [entry.t for entry in index.log]
    assert times == sorted(times)
    assert len(times) == index.num_lines
    assert [entry.kind for entry in index.log].count("attempt") == len(index.attempts)


def test_jumps_go_to_failures_reviews_and_recalls(index: RunIndex) -> None:
    failures = index.jumps("failure")
    assert {index.attempts[jump.attempt_id or ""].outcome for jump in failures} == {"failed"}
    assert len(index.jumps("review")) == sum(
        one.is_review for robot in index.robots.values() for one in robot.hours
    )
    for jump in index.jumps("recall"):
        (exchange,) = [one for one in index.robot(jump.robot).exchanges if one.idx == jump.exchange]
        assert exchange.num_recalled == 6


def test_refresh_takes_in_what_was_recorded_since_and_nothing_twice(tmp_path: Path) -> None:
    run_dir = MadeRun(tmp_path / "growing", num_robots=1, operation_s=5, num_recorded=0).build()
    index = RunIndex(run_dir)
    assert not index.refresh()
    num_attempts, revision = len(index.attempts), index.revision
    last = index.robot("robot-1").attempts[-1]
    with RunStore(database_url(run_dir), run_dir.name) as store:
        row = store.rows(AttemptRow, attempt_id=last.attempt_id)[0]
        values = {c.name: getattr(row, c.name) for c in AttemptRow.__table__.columns}
        store.save(
            AttemptRow(**values | {"attempt_id": "robot-1-9.9.9-w1", "start_s": last.end_s, "end_s": 99.0})
        )
    assert index.refresh()
    assert len(index.attempts) == num_attempts + 1
    assert index.end_s == 99.0
    assert index.robot("robot-1").revision == index.revision > revision
    assert index.bars("robot-1").ends[-1] == 99.0
    index.close()


def test_a_renamed_folder_is_still_its_run_and_a_stranger_is_none(tmp_path: Path, made_run: Path) -> None:
    run_dir = MadeRun(tmp_path / "one", num_robots=1, operation_s=5, num_recorded=0).build()
    renamed = run_dir.rename(tmp_path / "renamed")
    assert RunIndex(renamed).records.run_id == "one"
    with pytest.raises(DayshiftError, match=r"no run here \(expected a folder with run\.db\)"):
        RunIndex(tmp_path)
    with RunStore(database_url(renamed), "two") as store:
        (row,) = [RunRow(run_id="two", name="x", created_at="", fps=20, config_yaml="", git_revision=None,
                         versions={}, seeds={})]  # fmt: skip
        store.save(row)
    with pytest.raises(DayshiftError, match="holds no run renamed"):
        RunIndex(renamed)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 50), st.floats(0, 20), st.sampled_from([0, 1, 2, 4, 5])), max_size=200
    ),
    st.floats(0, 500),
    st.floats(1, 2000),
    st.integers(1, 300),
)
def test_merged_bars_cover_the_same_time_and_hide_no_failure(
    parts: list[tuple[float, float, int]], from_s: float, span_s: float, width: int
) -> None:
    starts, ends, codes, t = [], [], [], 0.0
    for length, gap, code in parts:
        starts.append(t)
        ends.append(t + length)
        codes.append(code)
        t += length + gap
    bars = Bars(np.array(starts), np.array(ends), np.array(codes, np.int64))
    to_s = from_s + span_s

    drawn = bars.window(from_s, to_s, width)

    inside = [(s, e, c) for s, e, c in zip(starts, ends, codes, strict=True) if e > from_s and s < to_s]
    assert len(drawn) <= 2 * width + 2
    assert (len(drawn) > 0) == (len(inside) > 0)
    pixel_s = span_s / width
    for start, end, code in inside:
        (cover,) = [bar for bar in drawn if bar[0] <= start + 1e-3 and end <= bar[1] + 1e-3][:1]
        assert cover[2] >= code
        # A merged bar is no wider than the pixel that its attempts share.
        assert cover[1] - cover[0] <= max(end - start, 2 * pixel_s) + 1e-2
