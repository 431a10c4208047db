from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recording_samples import (
    STORY,
    PaintedRenderer,
    Try,
    attempt_row,
    make_frames,
    make_run,
    make_spec,
    make_start,
    recording_row,
)

from dayshift.dataset_export import lerobot_v3 as v3
from dayshift.dataset_export.dataset_draft import FileSizes
from dayshift.dataset_export.dataset_files import read_meta, staging_folder
from dayshift.dataset_export.durable import only_writer
from dayshift.dataset_export.errors import RecordingError
from dayshift.dataset_export.export import ExportOptions, export_dataset
from dayshift.dataset_export.store import RunStore, database_url
from dayshift.dataset_export.verify import check_dataset
from dayshift.dataset_export.video import AV1, VideoReader
from dayshift.dataset_export.writer_process import RecorderProcess
from dayshift.types import DayshiftError, Outcome


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run-1")


def all_rows(dataset: Path) -> list[dict]:
    return [
        row for path in sorted(dataset.glob("data/*/*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


def assert_whole(dataset: Path) -> None:
    assert [str(problem) for problem in check_dataset(dataset).problems] == []


def test_every_frame_is_exported_as_it_was_recorded(run_dir: Path, tmp_path: Path) -> None:
    report = export_dataset([run_dir], tmp_path / "ds")
    assert (report.num_added, report.num_rendered, report.skipped) == (5, 0, ())
    assert_whole(tmp_path / "ds")
    rows = iter(all_rows(tmp_path / "ds"))
    index = 0
    for number, one in enumerate(STORY):
        for frame in make_frames(one.num_frames, images_every=0, seed=number):
            row = next(rows)
            is_last = frame.index == one.num_frames - 1
            assert row["observation.state"] == frame.robot_state.tolist()
            assert row["action"] == frame.action.tolist()
            assert (row["next.reward"], row["next.success"]) == (frame.reward, frame.success)
            assert row["next.done"] == is_last
            assert row["timestamp"] == np.float32(frame.index / 20)
            assert row["recorded_at"] == 10.0 * number + 0.05 * frame.index
            assert row["attempt_id"] == f"run-1/{one.attempt_id}"
            assert (row["episode_index"], row["frame_index"], row["index"]) == (number, frame.index, index)
            index += 1
    assert next(rows, None) is None
    assert index == report.num_frames


def test_pictures_are_copied_without_a_change(run_dir: Path, tmp_path: Path) -> None:
    export_dataset([run_dir], tmp_path / "ds")
    shard = tmp_path / "ds/videos/observation.images.image2/chunk-000/file-000.mp4"
    number = 0
    with VideoReader(shard, fps=20) as copied:
        for one in STORY:
            with VideoReader(run_dir / "attempts" / one.attempt_id / "wrist.mp4", fps=20) as recorded:
                for _, picture in recorded.frames():
                    assert np.array_equal(copied.frame(number), picture)
                    number += 1
        assert copied.frame_indices == list(range(number))


def test_each_episode_says_what_it_was(run_dir: Path, tmp_path: Path) -> None:
    export_dataset([run_dir], tmp_path / "ds")
    meta = read_meta(tmp_path / "ds")
    assert meta.info.total_episodes == len(meta.attempts) == 5
    facts = [
        (row["shift"], row["job"], row["step"], row["attempt"], row["is_review"], row["outcome"])
        for row in meta.attempts
    ]
    assert facts == [(*one.key, one.number, one.is_review, one.outcome) for one in STORY]
    first, redone = meta.attempts[0], meta.attempts[4]
    assert (first["step_state"], first["give_up_reason"]) == ("given_up", "attempts")
    assert (redone["step_state"], redone["give_up_reason"]) == ("done", "")
    assert (first["seed"], first["init_state_id"], first["fault"]) == (11, 3, "push")
    assert (first["engine_session"], first["planner_memory"]) == ("session-robot-0", "recall_kv")
    assert redone["planner_recalled_tokens"] == 800  # review question and command
    for row, episode in zip(meta.attempts, meta.episodes, strict=True):
        assert {name: episode[name] for name in row if "/" not in name} == {
            name: value for name, value in row.items() if "/" not in name
        }
    card = (tmp_path / "ds/README.md").read_text()
    assert "| **all** | 5 | 3 | 2 | 1 |" in card
    assert "* mujoco: 3.3.7" in card


def test_the_planner_is_on_the_frames_that_it_spoke_about(run_dir: Path, tmp_path: Path) -> None:
    export_dataset([run_dir], tmp_path / "ds")
    rows = all_rows(tmp_path / "ds")
    redo = [row for row in rows if row["episode_index"] == 4]
    said = [[(event["role"], event["content"]) for event in row[v3.EVENTS]] for row in redo]
    task = STORY[4].task
    assert said[0] == [
        ("user", "Review of shift 1: list every step given up in shift 1."),
        ("assistant", json.dumps({"redo": [{"job": 1, "step": 1, "task": task}]}, separators=(",", ":"))),
        ("user", f"Shift 1, job 1, step 1: {task}."),
        ("assistant", json.dumps({"action": "execute", "task": task}, separators=(",", ":"))),
    ]
    assert said[-1] == [("user", "Result: done."), ("assistant", '{"action":"next"}')]
    assert said[1:-1] == [[]] * (len(redo) - 2)
    calls = [json.loads(call) for event in redo[0][v3.EVENTS] for call in event["tool_calls"] or ()]
    assert [call["function"]["name"] for call in calls] == ["redo", "execute"]
    assert calls[1]["function"]["arguments"] == {"task": task}
    declared = [tool["function"]["name"] for tool in read_meta(tmp_path / "ds").info.tools or ()]
    assert declared == ["execute", "next", "give_up", "redo"]

    texts = {state["style"]: state["content"] for state in redo[5][v3.PERSISTENT]}
    assert texts["subtask"] == task
    assert texts["plan"] == f"Shift 1, job 1: 1. {task}; 2. {STORY[2].task}."
    assert texts["memory"] == f"Given up in shift 1: job 1, step 1: {task}."
    assert all(row[v3.PERSISTENT] == redo[0][v3.PERSISTENT] for row in redo)
    second_try = next(row for row in rows if row["episode_index"] == 1)
    memory = [state["content"] for state in second_try[v3.PERSISTENT] if state["style"] == "memory"]
    assert memory == ["Failed attempts before this one: 1."]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (ExportOptions(only=(Outcome.FAILED,)), [0, 1]),
        (ExportOptions(where="outcome == 'failed' and attempt > 1"), [1]),
        (ExportOptions(where="is_review or num_frames < 8"), [2, 4]),
        (ExportOptions(where="give_up_reason = 'attempts'", only=(Outcome.DONE,)), []),
    ],
)
def test_filters_choose_attempts(
    run_dir: Path, tmp_path: Path, options: ExportOptions, expected: list[int]
) -> None:
    if not expected:
        with pytest.raises(DayshiftError, match="none of 5 recorded attempts was selected"):
            export_dataset([run_dir], tmp_path / "ds", options)
        assert list(tmp_path.iterdir()) == []
        return
    export_dataset([run_dir], tmp_path / "ds", options)
    chosen = [row["attempt_id"] for row in read_meta(tmp_path / "ds").attempts]
    assert chosen == [STORY[i].attempt_id for i in expected]
    assert_whole(tmp_path / "ds")


@pytest.mark.parametrize("where", ["outcom == 'done'", "outcome ==", "1; drop table facts", "'"])
def test_a_wrong_filter_is_one_line_with_the_allowed_names(run_dir: Path, tmp_path: Path, where: str) -> None:
    with pytest.raises(DayshiftError, match="allowed names: run_id, attempt_id") as caught:
        export_dataset([run_dir], tmp_path / "ds", ExportOptions(where=where))
    assert "\n" not in str(caught.value)


def test_the_same_runs_give_the_same_dataset_byte_for_byte(run_dir: Path, tmp_path: Path) -> None:
    for name in ("one", "other"):
        export_dataset([run_dir], tmp_path / name)
    one, other = tmp_path / "one", tmp_path / "other"
    files = {path.relative_to(one) for path in one.rglob("*") if path.is_file()}
    assert files == {path.relative_to(other) for path in other.rglob("*") if path.is_file()}
    assert [path for path in files if (one / path).read_bytes() != (other / path).read_bytes()] == []


def test_a_run_is_exported_while_it_goes_on(tmp_path: Path) -> None:
    run, dataset = make_run(tmp_path / "run-1", STORY[:2], image_size=32), tmp_path / "ds"
    with RunStore(database_url(run), run.name) as store, RecorderProcess(run, now=time.monotonic) as recorder:
        with recorder.attempt("in-flight") as attempt:
            attempt.on_start(make_spec(image_size=32), make_start())
            frames = make_frames(9, images_every=1, image_size=32)
            for frame in frames[:5]:
                attempt.on_frame(frame)
            assert export_dataset([run], dataset).num_added == 2
            assert_whole(dataset)
            for frame in frames[5:]:
                attempt.on_frame(frame)
            recording = attempt.finish()
        # Its files are there, but its outcome is not committed yet.
        store.save(recording_row(run.name, recording))
        assert export_dataset([run], dataset, ExportOptions(append=True)).num_added == 0
        store.save(attempt_row(run.name, "in-flight", start_s=99.0, num_control_steps=9))
        assert export_dataset([run], dataset, ExportOptions(append=True)).num_added == 1
    assert_whole(dataset)
    assert [row["attempt_id"] for row in read_meta(dataset).attempts][-1] == "in-flight"


def test_several_runs_make_one_dataset(run_dir: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "run-2", [Try(key=(1, 1, 1), num_frames=6), Try(key=(1, 2, 1), num_frames=2)])
    export_dataset([run_dir, other], tmp_path / "ds")
    meta = read_meta(tmp_path / "ds")
    assert [row["run_id"] for row in meta.attempts] == ["run-1"] * 5 + ["run-2"] * 2
    assert_whole(tmp_path / "ds")


def test_a_place_that_takes_no_folder_is_one_line(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file" / "ds", Path("/proc/ds")):
        with pytest.raises(DayshiftError, match=f"cannot write {place}: "):
            export_dataset([run_dir], place)


def test_appending_adds_what_is_missing_and_goes_on_in_the_last_videos(run_dir: Path, tmp_path: Path) -> None:
    dataset = tmp_path / "ds"
    export_dataset([run_dir], dataset, ExportOptions(where="shift = 1 and not is_review"))
    before = {path: path.stat().st_ino for path in dataset.rglob("*-000.parquet")}
    with pytest.raises(DayshiftError, match="exists already"):
        export_dataset([run_dir], dataset)

    report = export_dataset([run_dir], dataset, ExportOptions(append=True))
    assert (report.num_present, report.num_added) == (3, 2)
    assert_whole(dataset)
    assert {path: path.stat().st_ino for path in before} == before
    again = export_dataset([run_dir], dataset, ExportOptions(append=True))
    assert (again.num_present, again.num_added) == (5, 0)

    other = make_run(tmp_path / "run-2", [Try(key=(1, 1, 1), num_frames=6)])
    export_dataset([other], dataset, ExportOptions(append=True))
    assert_whole(dataset)
    meta = read_meta(dataset)
    assert [row["data/file_index"] for row in meta.episodes] == [0, 0, 0, 1, 1, 2]
    assert len(list(dataset.glob("videos/*/*/*.mp4"))) == 2  # one for each camera: it can be streamed
    assert not staging_folder(dataset).exists()

    export_dataset([run_dir, other], tmp_path / "at_once")
    for key in v3.VIDEO_KEYS.values():
        name = f"videos/{key}/chunk-000/file-000.mp4"
        assert digests(dataset / name, 68) == digests(tmp_path / "at_once" / name, 68)


@pytest.mark.parametrize(
    ("sizes", "video_files"),
    [
        (FileSizes(video_file_mb=0.001), [0, 1, 2, 3, 4]),  # full ones are left alone
        (FileSizes(together=True), [0, 0, 0, 1, 1]),
    ],
)
def test_appending_starts_new_videos_where_it_must(
    run_dir: Path, tmp_path: Path, sizes: FileSizes, video_files: list[int]
) -> None:
    dataset = tmp_path / "ds"
    export_dataset([run_dir], dataset, ExportOptions(where="shift = 1 and not is_review", sizes=sizes))
    before = {path: path.stat().st_ino for path in dataset.rglob("*.mp4")}
    export_dataset([run_dir], dataset, ExportOptions(append=True, sizes=sizes))
    assert_whole(dataset)
    assert {path: path.stat().st_ino for path in before} == before
    key = v3.VIDEO_KEYS["wrist"]
    assert [row[f"videos/{key}/file_index"] for row in read_meta(dataset).episodes] == video_files


def test_appending_to_a_broken_video_is_one_line_and_changes_nothing(run_dir: Path, tmp_path: Path) -> None:
    dataset = tmp_path / "ds"
    export_dataset([run_dir], dataset, ExportOptions(where="shift = 1 and not is_review"))
    video = dataset / "videos/observation.images.image/chunk-000/file-000.mp4"
    video.write_bytes(video.read_bytes()[:900])
    with pytest.raises(
        DayshiftError, match=r"cannot append to .*file-000.mp4: .*; repair it first"
    ) as caught:
        export_dataset([run_dir], dataset, ExportOptions(append=True))
    assert "\n" not in str(caught.value)
    assert read_meta(dataset).info.total_episodes == 3
    assert not staging_folder(dataset).exists()


@pytest.mark.parametrize("fps", [10, 20, 24, 25, 30, 50, 60])
def test_lerobot_finds_every_picture_of_a_long_video(fps: int) -> None:
    """It compares times as float32; beyond 1,024 s these are further apart than its tolerance."""
    frame = np.arange(2_000_000)
    in_episode = frame % 1200
    from_timestamp = (frame - in_episode) / fps
    asked = (from_timestamp + (in_episode / fps).astype(np.float32)).astype(np.float32)
    shown = (frame / fps).astype(np.float32)  # the video's own time, rounded
    assert np.abs(asked - shown).max() < 1e-4


def test_what_does_not_go_with_the_dataset_changes_nothing(run_dir: Path, tmp_path: Path) -> None:
    dataset = tmp_path / "ds"
    export_dataset([run_dir], dataset)
    before = {path: path.read_bytes() for path in dataset.rglob("*") if path.is_file()}
    larger = make_run(tmp_path / "run-2", [Try()], image_size=96)
    with pytest.raises(
        DayshiftError, match=r"observation.images.image of attempt .* does not go with"
    ) as caught:
        export_dataset([larger], dataset, ExportOptions(append=True))
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in dataset.rglob("*") if path.is_file()} == before
    assert not staging_folder(dataset).exists()


def test_two_exports_never_write_one_dataset(run_dir: Path, tmp_path: Path) -> None:
    stage = staging_folder(tmp_path / "ds")
    stage.mkdir()
    with only_writer(stage), pytest.raises(RecordingError, match="another process is still writing"):
        export_dataset([run_dir], tmp_path / "ds")


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    data_file_mb=st.sampled_from([0.01, 0.02, 100]),
    video_file_mb=st.sampled_from([0.002, 0.006, 200]),
    same_shards=st.booleans(),
)
def test_shards_of_every_kind_roll_over_at_different_episodes(
    tmp_path_factory, run_dir: Path, data_file_mb: float, video_file_mb: float, same_shards: bool
) -> None:
    dataset = tmp_path_factory.mktemp("ds") / "ds"
    options = ExportOptions(
        sizes=FileSizes(data_file_mb=data_file_mb, video_file_mb=video_file_mb, together=same_shards)
    )
    export_dataset([run_dir], dataset, options)
    assert_whole(dataset)
    keys = list(v3.VIDEO_KEYS.values())
    for row in read_meta(dataset).episodes:
        places = {
            (row[f"{kind}/chunk_index"], row[f"{kind}/file_index"])
            for kind in ("data", *(f"videos/{k}" for k in keys))
        }
        times = {row[f"videos/{key}/from_timestamp"] for key in keys}
        assert not same_shards or (len(places), len(times)) == (1, 1)


def many_short_episodes(tmp_path: Path, num_episodes: int) -> None:
    rng = np.random.default_rng(5)
    tries = [
        Try(key=(1 + i // 30, 1 + i % 30, 1), num_frames=int(rng.integers(7, 18)))
        for i in range(num_episodes)
    ]
    run = make_run(tmp_path / "run-1", tries, image_size=32)
    export_dataset([run], tmp_path / "ds", ExportOptions(sizes=FileSizes(video_file_mb=0.5)))
    assert_whole(tmp_path / "ds")
    first: dict[tuple[str, int], int] = {}
    for row in read_meta(tmp_path / "ds").episodes:
        for key in v3.VIDEO_KEYS.values():
            shard = (key, row[f"videos/{key}/file_index"])
            start = first.get(shard, 0)
            assert row[f"videos/{key}/from_timestamp"] == start / 20  # exactly: no sum of floats
            first[shard] = start + row["length"]


def test_times_never_drift(tmp_path: Path) -> None:
    many_short_episodes(tmp_path, 60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_times_never_drift_over_500_episodes(tmp_path: Path) -> None:
    many_short_episodes(tmp_path, 500)


def test_a_broken_attempt_is_named_and_the_others_are_exported(run_dir: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(run_dir, tmp_path / "run-1")
    folders = [broken / "attempts" / one.attempt_id for one in STORY]
    (folders[0] / "frames.parquet").write_bytes((folders[0] / "frames.parquet").read_bytes()[:-10])
    (folders[1] / "agentview.mp4").write_bytes((folders[1] / "agentview.mp4").read_bytes()[:500])
    shutil.copy(folders[2] / "wrist.mp4", folders[3] / "wrist.mp4")  # 7 pictures for 20 control steps
    (folders[4] / "wrist.counts.json").unlink()
    report = export_dataset([broken], tmp_path / "ds")
    assert [skipped.attempt_id for skipped in report.skipped] == [STORY[i].attempt_id for i in (0, 1, 3, 4)]
    assert "expected pictures 0 to 19" in report.skipped[2].reason
    assert report.num_added == 1
    assert_whole(tmp_path / "ds")


def test_an_export_without_pictures_or_talk_is_whole_too(run_dir: Path, tmp_path: Path) -> None:
    export_dataset([run_dir], tmp_path / "ds", ExportOptions(cameras=(), language=False))
    assert_whole(tmp_path / "ds")
    info = read_meta(tmp_path / "ds").info
    assert info.video_path is None
    assert not {*info.features} & {*v3.LANGUAGE, *v3.VIDEO_KEYS.values()}
    assert not list((tmp_path / "ds").glob("videos"))


@pytest.mark.parametrize("codec_name", ["h264", "av1"])
def test_missing_pictures_are_rendered_once_and_equal_to_live_ones(tmp_path: Path, codec_name: str) -> None:
    tries = [Try(key=(1, 1, 1), num_frames=30), Try(key=(1, 1, 2), num_frames=9)]
    sparse = make_run(tmp_path / "sparse", tries, images_every=5)
    renderer = PaintedRenderer()
    options = ExportOptions() if codec_name == "h264" else ExportOptions(codec=AV1)
    report = export_dataset([sparse], tmp_path / "ds", options, make_renderer=lambda: renderer)
    assert (report.num_rendered, renderer.num_loads) == (2, 2)
    assert_whole(tmp_path / "ds")
    assert (
        read_meta(tmp_path / "ds").info.features[v3.VIDEO_KEYS["wrist"]]["info"]["video.codec"] == codec_name
    )

    again = export_dataset([sparse], tmp_path / "again", options, make_renderer=lambda: renderer)
    assert (again.num_rendered, renderer.num_loads) == (0, 2)
    if codec_name == "h264":
        live = make_run(tmp_path / "live", tries, images_every=1)
        export_dataset([live], tmp_path / "from_live")
        for key in v3.VIDEO_KEYS.values():
            name = f"videos/{key}/chunk-000/file-000.mp4"
            assert digests(tmp_path / "ds" / name, 39) == digests(tmp_path / "from_live" / name, 39)


def digests(video: Path, num_pictures: int) -> list[str]:
    with VideoReader(video, fps=20) as reader:
        return [reader.digest(i) for i in range(num_pictures)]


def test_a_full_disk_is_one_line_and_leaves_the_old_dataset(run_dir: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        export_dataset([run_dir], disk / "ds", ExportOptions(where="shift = 2"))
        for _ in range(2):
            with pytest.raises(RecordingError, match="disk full while writing") as caught:
                export_dataset([run_dir], disk / "ds", ExportOptions(append=True))
            assert "\n" not in str(caught.value)
            assert_whole(disk / "ds")
            assert read_meta(disk / "ds").info.total_episodes == 1
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
