"""The real lerobot reads and edits what we write. Its imports take long, so it runs twice in all."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from datasets import Features
from lerobot.configs.recipe import TrainingRecipe
from lerobot.datasets.compute_stats import aggregate_stats, get_feature_stats
from lerobot.datasets.feature_utils import get_hf_features_from_features
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.lerobot_types import EnvTransition, TransitionKey
from lerobot.processor.render_messages_processor import RenderMessagesStep
from recording_samples import STORY, Try, make_run

from dayshift.dataset_export import lerobot_v3 as v3
from dayshift.dataset_export.dataset_draft import FileSizes
from dayshift.dataset_export.dataset_files import read_meta
from dayshift.dataset_export.export import ExportOptions, export_dataset
from dayshift.dataset_export.fresh_process import LeRobotReport, run_lerobot, verify_with_lerobot
from dayshift.dataset_export.stats import STAT_NAMES, aggregate, column_stats
from dayshift.dataset_export.verify import check_dataset
from dayshift.dataset_export.video import VideoReader

NAMES = ("whole", "sharded", "deleted", "split/early", "split/late", "merged", "broken")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset in one file of each kind, one in several, what lerobot's tools make of it, a broken one."""
    folder = tmp_path_factory.mktemp("lerobot")
    run = make_run(
        folder / "run-1", [*STORY, Try(key=(3, 1, 1), num_frames=1), Try(key=(3, 1, 2), num_frames=6)]
    )
    export_dataset([run], folder / "whole")
    export_dataset(
        [run], folder / "sharded", ExportOptions(sizes=FileSizes(data_file_mb=0.01, video_file_mb=0.004))
    )
    run_lerobot(["-m", "dayshift.dataset_export.edit_with_lerobot", str(folder / "sharded"), str(folder)])
    mislabel_first_frame(Path(shutil.copytree(folder / "whole", folder / "broken")))
    return folder


def mislabel_first_frame(dataset: Path) -> None:
    path = dataset / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    number = table.schema.get_field_index("frame_index")
    frame_index = table.column("frame_index").to_numpy().copy()
    frame_index[0] = 5
    pq.write_table(table.set_column(number, table.schema.field(number), [frame_index]), path)


@pytest.fixture(scope="module")
def reports(folder: Path) -> dict[str, LeRobotReport]:
    found = verify_with_lerobot([folder / name for name in NAMES])
    return dict(zip(NAMES, found, strict=True))


def test_the_dataset_has_several_shards_of_each_kind(folder: Path) -> None:
    rows = read_meta(folder / "sharded").episodes
    for kind in ("data", *(f"videos/{key}" for key in v3.VIDEO_KEYS.values())):
        assert len({row[f"{kind}/file_index"] for row in rows}) > 1


@pytest.mark.parametrize("name", NAMES[:-1])
def test_lerobot_gives_the_right_frames(folder: Path, reports: dict[str, LeRobotReport], name: str) -> None:
    assert [str(problem) for problem in check_dataset(folder / name).problems] == []
    assert reports[name].problems == []
    num_boundaries = sum(min(2, row["length"]) for row in read_meta(folder / name).episodes)
    is_streamed = not reports[name].notes
    assert reports[name].num_items == num_boundaries * (1 + is_streamed)
    assert is_streamed or name not in ("whole", "merged")


def test_what_lerobot_gets_wrong_is_reported(reports: dict[str, LeRobotReport]) -> None:
    assert {problem.where for problem in reports["broken"].problems} >= {"episode 0"}


@pytest.mark.parametrize("name", ["deleted", "split/early", "split/late", "merged"])
def test_editing_keeps_every_frame_with_its_attempt(folder: Path, name: str) -> None:
    original, edited = pictures(folder / "sharded"), pictures(folder / name)
    assert set(edited) <= set(original)
    if name == "merged":
        assert set(edited) == set(original)
    for key, picture in edited.items():  # lerobot encodes again where it cuts, so not bit for bit
        distance = np.abs(picture.astype(int) - original[key]).mean()
        assert distance < 6, key


def pictures(dataset: Path) -> dict[tuple[str, int, str], np.ndarray]:
    """Boundary pictures by (attempt, frame, camera)."""
    meta = read_meta(dataset)
    found = {}
    for row in meta.episodes:
        data = pq.read_table(
            dataset / v3.DATA_PATH.format(chunk_index=0, file_index=row["data/file_index"]),
            filters=[("episode_index", "=", row["episode_index"])],
        )
        attempt = data.column("attempt_id")[0].as_py()
        for key in meta.info.video_keys:
            shard = v3.VIDEO_PATH.format(
                video_key=key, chunk_index=0, file_index=row[f"videos/{key}/file_index"]
            )
            first = round(row[f"videos/{key}/from_timestamp"] * 20)
            with VideoReader(dataset / shard, fps=20) as video:
                for frame_index in (0, row["length"] - 1):
                    found[attempt, frame_index, key] = video.frame(first + frame_index)
    return found


def test_statistics_are_lerobots() -> None:
    rng = np.random.default_rng(3)
    columns = [rng.normal(size=(n, 3)).astype(np.float32) for n in (40, 7, 2000)]
    ours = [{"x": column_stats(column)} for column in columns]
    theirs = [{"x": get_feature_stats(column, axis=0, keepdims=False)} for column in columns]
    for mine, other in zip(ours, theirs, strict=True):
        for name in STAT_NAMES:
            # lerobot reads quantiles off a histogram, without interpolating between values: ours are exact.
            if not name.startswith("q"):
                assert np.allclose(mine["x"][name], other["x"][name], atol=1e-5), name
            elif mine["x"]["count"] >= 200:
                assert np.allclose(mine["x"][name], other["x"][name], atol=0.3), name
    for name, value in aggregate_stats(ours)["x"].items():
        assert np.allclose(aggregate(ours)["x"][name], value, rtol=1e-12), name


@pytest.fixture
def whole(folder: Path) -> LeRobotDataset:
    return LeRobotDataset("local/whole", root=folder / "whole", video_backend="pyav", return_uint8=True)


def test_lerobot_decodes_every_frame_of_every_episode(folder: Path, whole: LeRobotDataset) -> None:
    rows = pq.read_table(folder / "whole" / v3.DATA_PATH.format(chunk_index=0, file_index=0)).to_pylist()
    with ExitStack() as stack:
        videos = {}
        for key in v3.VIDEO_KEYS.values():
            path = v3.VIDEO_PATH.format(video_key=key, chunk_index=0, file_index=0)
            videos[key] = stack.enter_context(VideoReader(folder / "whole" / path, fps=20))
        assert len(whole) == len(rows)
        for index, row in enumerate(rows):
            item = cast(dict[str, Any], whole[index])
            place = (int(item["episode_index"]), int(item["frame_index"]))
            assert place == (row["episode_index"], row["frame_index"])
            assert item["action"].tolist() == row["action"]
            for key, video in videos.items():
                assert np.array_equal(item[key].permute(1, 2, 0).numpy(), video.frame(index))


def test_lerobot_renders_messages_from_the_planners_talk(whole: LeRobotDataset) -> None:
    first_of_redo = sum(one.num_frames for one in STORY[:4])
    recipe = TrainingRecipe.from_dict(
        {
            "bindings": {"answer": "emitted_at(t, role=assistant, tool_name=redo)"},
            "messages": [
                {"role": "user", "content": "${task}. ${memory}", "stream": "high_level"},
                {"role": "assistant", "content": "${subtask}", "stream": "low_level", "target": True},
                {
                    "role": "assistant",
                    "content": "${answer}",
                    "stream": "high_level",
                    "if_present": "answer",
                    "tool_calls_from": "answer",
                },
            ],
        }
    )
    task = STORY[4].task
    redo = {"redo": [{"job": 1, "step": 1, "task": task}]}
    call = {"type": "function", "function": {"name": "redo", "arguments": {"steps": redo["redo"]}}}
    expected = [
        {"role": "user", "content": f"{task}. Given up in shift 1: job 1, step 1: {task}."},
        {"role": "assistant", "content": task},
        {"role": "assistant", "content": json.dumps(redo, separators=(",", ":")), "tool_calls": [call]},
    ]
    for frame_index, messages in ((0, expected), (1, expected[:2])):
        sample = {TransitionKey.COMPLEMENTARY_DATA: whole[first_of_redo + frame_index]}
        rendered = RenderMessagesStep(recipe)(cast(EnvTransition, sample))
        assert rendered is not None
        assert rendered[TransitionKey.COMPLEMENTARY_DATA]["messages"] == messages
    assert [tool["function"]["name"] for tool in whole.meta.tools] == ["execute", "next", "give_up", "redo"]


def test_files_are_typed_as_lerobot_and_pandas_would_type_them(folder: Path) -> None:
    features = v3.COLUMNS | v3.LANGUAGE
    theirs = get_hf_features_from_features(
        {key: feature | {"shape": tuple(feature["shape"])} for key, feature in features.items()}
    )
    ours = v3.data_schema(features)
    assert ours == theirs.arrow_schema
    assert Features.from_arrow_schema(ours) == theirs
    tasks = pd.read_parquet(folder / "whole" / v3.TASKS)
    assert tasks.index.name == "task"
    assert list(tasks.columns) == ["task_index"]
    assert tasks.index.tolist() == read_meta(folder / "whole").tasks


def test_lerobot_doctor_fails_nothing_but_messages_that_are_not_on_every_frame(folder: Path) -> None:
    """Its check of consistency takes a language column for an array: as many rows on every frame."""
    runner = pytest.importorskip("lerobot_doctor.runner", reason="lerobot-doctor is not installed")
    loader = pytest.importorskip("lerobot_doctor.dataset_loader")

    def failures(dataset: Path) -> list[str]:
        report = runner.run_checks(loader.load_dataset(str(dataset)))
        messages = [message for result in report.results for message in result.messages]
        return [message.message for message in messages if message.severity == runner.Severity.FAIL]

    long_ones = "num_frames > 1"  # it wants two frames at least
    export_dataset([folder / "run-1"], folder / "silent", ExportOptions(language=False, where=long_ones))
    assert failures(folder / "silent") == []
    export_dataset([folder / "run-1"], folder / "talking", ExportOptions(where=long_ones))
    assert failures(folder / "talking")
    assert all("language_" in message for message in failures(folder / "talking"))
