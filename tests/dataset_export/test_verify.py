"""Every kind of damage is found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import av
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recording_samples import make_run

from dayshift.dataset_export import lerobot_v3 as v3
from dayshift.dataset_export.dataset_draft import FileSizes
from dayshift.dataset_export.dataset_files import read_meta
from dayshift.dataset_export.export import ExportOptions, export_dataset
from dayshift.dataset_export.repair_dataset import repair_dataset
from dayshift.dataset_export.verify import check_dataset
from dayshift.types import DayshiftError

DATA, EPISODES = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
VIDEO = "videos/observation.images.image/chunk-000/file-000.mp4"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    export_dataset(
        [make_run(folder / "run-1")], folder / "ds", ExportOptions(sizes=FileSizes(data_file_mb=0.01))
    )
    return folder / "ds"


def edit_info(dataset: Path, **changes: object) -> None:
    info = json.loads((dataset / v3.INFO).read_text())
    (dataset / v3.INFO).write_text(json.dumps(info | changes))


def edit_table(dataset: Path, name: str, edit: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    """Change a parquet file's rows; its schema stays."""
    table = pq.read_table(dataset / name)
    columns = [column for column in table.column_names if "language" not in column]
    edited = pa.Table.from_pandas(edit(table.select(columns).to_pandas()), preserve_index=False)
    for column in set(table.column_names) - set(columns):
        edited = edited.append_column(column, table.column(column).slice(0, edited.num_rows))
    pq.write_table(edited, dataset / name)


def set_value(dataset: Path, name: str, column: str, row: int, value: object) -> None:
    def edit(frame: pd.DataFrame) -> pd.DataFrame:
        frame.at[row, column] = value
        return frame

    edit_table(dataset, name, edit)


def drop_picture(dataset: Path, number: int) -> None:
    """What a dropping encoder does: one picture is gone, all later ones move up."""
    source_path = (dataset / VIDEO).rename(dataset / "source.mp4")
    with av.open(str(source_path)) as source, av.open(str(dataset / VIDEO), "w") as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream, opaque=True)
        packets = [packet for packet in source.demux(stream) if packet.size]
        times = [packet.pts for packet in packets]
        del packets[number]
        for packet, time in zip(packets, times, strict=False):
            packet.pts = packet.dts = time
            packet.stream = copy
            target.mux(packet)
    source_path.unlink()


def truncate(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "counted episodes that are not there": (
        lambda ds: edit_info(ds, total_episodes=6, splits={"train": "0:6"}),
        "meta/info.json: total_episodes is 6, the files have 5",
    ),
    "video missing": (lambda ds: (ds / VIDEO).unlink(), f"{VIDEO}: the file is missing"),
    "video cut off": (lambda ds: truncate(ds / VIDEO, 900), f"{VIDEO}: "),
    "rows missing": (lambda ds: (ds / DATA).unlink(), f"{DATA}: the file is missing"),
    "rows cut off": (lambda ds: truncate(ds / DATA, 900), f"{DATA}: Parquet magic bytes not found"),
    "orphan rows": (
        lambda ds: shutil.copy(ds / DATA, ds / "data/chunk-000/file-009.parquet"),
        "data/chunk-000/file-009.parquet: no episode is in this file",
    ),
    "dropped picture": (lambda ds: drop_picture(ds, 20), f"{VIDEO}: 61 pictures or wrong times"),
    "another episode's pictures": (
        lambda ds: shutil.copy(ds / VIDEO.replace("image/", "image2/"), ds / VIDEO),
        "episode 0: the first picture of observation.images.image is not the one recorded",
    ),
    "drifted time": (
        lambda ds: set_value(ds, EPISODES, "videos/observation.images.image/from_timestamp", 3, 1.56),
        "episode 3: observation.images.image is at pictures",
    ),
    "length 0": (lambda ds: set_value(ds, EPISODES, "length", 2, 0), "episode 2: length 0"),
    "episodes out of order": (
        lambda ds: edit_table(ds, EPISODES, lambda frame: frame.iloc[::-1]),
        "episode 0: its row says episode_index 4",
    ),
    "tasks out of order": (
        lambda ds: pd.read_parquet(ds / v3.TASKS).iloc[::-1].to_parquet(ds / v3.TASKS),
        "meta/tasks.parquet: task_index is [1, 0], expected 0 to 1",
    ),
    "wrong task": (
        lambda ds: set_value(ds, DATA, "task_index", 3, 1),
        "episode 0: its frames have the tasks",
    ),
    "wrong row number": (lambda ds: set_value(ds, DATA, "index", 4, 77), "episode 0: index is not"),
    "wrong timestamp": (lambda ds: set_value(ds, DATA, "timestamp", 4, 0.21), "episode 0: timestamp is not"),
    "not a number": (
        lambda ds: set_value(ds, DATA, "action", 0, [float("nan")] * 7),
        "episode 0: action has values that are no finite numbers",
    ),
    "statistics of other frames": (
        lambda ds: set_value(ds, EPISODES, "stats/action/max", 1, [9.0] * 7),
        "episode 1: the statistics of action are not those of its frames",
    ),
    "statistics computed in another way": (
        lambda ds: (ds / v3.STATS).write_text(
            json.dumps(json.loads((ds / v3.STATS).read_text()) | {"next.reward": {"mean": [0.5]}})
        ),
        "meta/stats.json: next.reward/",
    ),
    "undeclared column": (
        lambda ds: edit_table(ds, DATA, lambda frame: frame.assign(extra=1)),
        f"{DATA}: columns ['extra'] are not in meta/info.json",
    ),
}


def test_a_whole_dataset_has_no_problem(whole: Path) -> None:
    report = check_dataset(whole)
    assert report.is_whole
    assert (report.num_episodes, report.num_frames, report.num_pictures) == (5, 62, 124)
    assert report.num_digests == 5 * 2 * 2


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_named(whole: Path, tmp_path: Path, name: str) -> None:
    damage, expected = DAMAGE[name]
    damaged = shutil.copytree(whole, tmp_path / "ds")
    damage(damaged)
    problems = [str(problem) for problem in check_dataset(damaged).problems]
    assert any(expected in problem for problem in problems), problems
    assert all("\n" not in problem for problem in problems)


def test_the_rest_is_still_checked_beside_a_broken_file(whole: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(whole, tmp_path / "ds")
    truncate(damaged / VIDEO, 900)
    set_value(damaged, EPISODES, "stats/action/max", 1, [9.0] * 7)
    report = check_dataset(damaged)
    assert report.num_pictures == 62  # of the other camera
    assert {problem.where for problem in report.problems} >= {VIDEO, "episode 1"}


@pytest.mark.parametrize(("name", "num_episodes"), [(EPISODES, 0), (v3.TASKS, 5), (v3.ATTEMPTS, 5)])
def test_a_broken_file_of_meta_is_named_and_the_rest_is_counted(
    whole: Path, tmp_path: Path, name: str, num_episodes: int
) -> None:
    damaged = shutil.copytree(whole, tmp_path / "ds")
    truncate(damaged / name, 100)
    truncate(damaged / VIDEO, 900)
    report = check_dataset(damaged)
    assert (report.num_episodes, report.num_frames, report.num_pictures) == (num_episodes, 62, 62)
    assert [problem.where for problem in report.problems] == [name, VIDEO]
    assert all("\n" not in str(problem) for problem in report.problems)
    with pytest.raises(DayshiftError, match="Parquet magic bytes not found"):
        repair_dataset(damaged)


def test_what_is_no_dataset_is_one_line(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(DayshiftError, match="no dataset here"):
        check_dataset(tmp_path)
    damaged = shutil.copytree(whole, tmp_path / "ds")
    edit_info(damaged, codebase_version="v2.1")
    with pytest.raises(DayshiftError, match=r"codebase_version v2.1, expected v3.0"):
        check_dataset(damaged)


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("counted episodes that are not there", set()),
        ("orphan rows", set()),
        ("wrong row number", set()),
        ("wrong timestamp", set()),
        ("episodes out of order", set()),
        ("tasks out of order", set()),
        ("statistics computed in another way", set()),
        ("length 0", {2}),
        ("drifted time", set()),  # by less than half a frame
        ("dropped picture", {1, 2, 3, 4}),  # all later ones have moved
        ("rows cut off", {0, 1, 2}),
    ],
)
def test_repair_keeps_what_can_be_saved(whole: Path, tmp_path: Path, name: str, lost: set[int]) -> None:
    damaged = shutil.copytree(whole, tmp_path / "ds")
    DAMAGE[name][0](damaged)
    repair = repair_dataset(damaged)
    assert {problem.where for problem in repair.dropped} == {f"episode {number}" for number in lost}
    assert repair.num_kept == 5 - len(lost)
    assert [str(problem) for problem in check_dataset(damaged).problems] == []
    attempts = [row["attempt_id"] for row in read_meta(whole).attempts]
    kept = {row["attempt_id"] for row in read_meta(damaged).attempts}
    assert kept == {attempt for number, attempt in enumerate(attempts) if number not in lost}
    assert str(repair_dataset(damaged)) == "nothing to repair"


@pytest.mark.parametrize("name", ["video missing", "video cut off"])
def test_repair_leaves_alone_what_it_cannot_save(whole: Path, tmp_path: Path, name: str) -> None:
    damaged = shutil.copytree(whole, tmp_path / "ds")
    DAMAGE[name][0](damaged)
    files = sorted(path for path in damaged.rglob("*"))
    with pytest.raises(DayshiftError, match="no episode can be saved; export the runs again"):
        repair_dataset(damaged)
    assert sorted(path for path in damaged.rglob("*")) == files
