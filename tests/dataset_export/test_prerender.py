from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from recording_samples import STORY, PaintedRenderer, Try, add_try, make_run

from dayshift.dataset_export import prerender as prerendering
from dayshift.dataset_export.dense_video import make_dense
from dayshift.dataset_export.durable import only_writer
from dayshift.dataset_export.errors import BusyError
from dayshift.dataset_export.export import export_dataset
from dayshift.dataset_export.prerender import PrerenderOptions, PrerenderReport, prerender
from dayshift.dataset_export.recorder import Recorder
from dayshift.dataset_export.run_folder import open_run
from dayshift.dataset_export.store import RunStore, database_url
from dayshift.dataset_export.verify import check_dataset


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    infra = Try(key=(3, 1, 1), outcome="infra", num_frames=4)
    return make_run(tmp_path / "run-1", [*STORY, infra], images_every=4, image_size=32)


def render(
    run_dir: Path, renderer: PaintedRenderer, options: PrerenderOptions | None = None
) -> PrerenderReport:
    with open_run(run_dir) as run:
        return prerender(run, options or PrerenderOptions(), make_renderer=lambda: renderer)


def no_renderer() -> PaintedRenderer:
    raise AssertionError("nothing was left to render")


def test_an_export_takes_what_was_rendered_before(run_dir: Path, tmp_path: Path) -> None:
    report = render(run_dir, PaintedRenderer())
    assert (report.num_rendered, report.num_present, report.broken) == (5, 0, {})
    with open_run(run_dir) as run:
        again = prerender(run, make_renderer=no_renderer)
    assert (again.num_rendered, again.num_present) == (0, 5)
    exported = export_dataset([run_dir], tmp_path / "ds", make_renderer=no_renderer)
    assert (exported.num_added, exported.num_rendered) == (5, 0)
    assert check_dataset(tmp_path / "ds").problems == ()


def test_only_the_cameras_that_are_missing_are_rendered(run_dir: Path) -> None:
    render(run_dir, PaintedRenderer(), PrerenderOptions(cameras=("wrist",)))
    folder = run_dir / "attempts" / STORY[0].attempt_id
    wrist = (folder / "wrist.dense.h264.mp4").stat().st_ino
    assert not (folder / "agentview.dense.h264.mp4").exists()
    render(run_dir, PaintedRenderer())
    assert (folder / "agentview.dense.h264.mp4").exists()
    assert (folder / "wrist.dense.h264.mp4").stat().st_ino == wrist


def test_a_broken_attempt_is_named_and_the_others_are_rendered(run_dir: Path) -> None:
    frames = run_dir / "attempts" / STORY[1].attempt_id / "frames.parquet"
    frames.write_bytes(frames.read_bytes()[:100])
    report = render(run_dir, PaintedRenderer())
    assert (report.num_rendered, report.num_present) == (4, 0)
    assert list(report.broken) == [STORY[1].attempt_id]


def test_two_processes_never_render_one_attempt_at_a_time(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prerendering, "LOOK_AGAIN_S", 0.05)
    renderer, busy = PaintedRenderer(), run_dir / "attempts" / STORY[2].attempt_id
    with only_writer(busy):
        worker = threading.Thread(target=render, args=(run_dir, renderer))
        worker.start()
        while renderer.num_loads < 4:  # it goes on with the others
            time.sleep(0.01)
        assert not list(busy.glob("*.dense.*"))
    worker.join()
    assert renderer.num_loads == 5
    assert len(list(busy.glob("*.dense.h264.mp4"))) == 2

    with open_run(run_dir) as run:
        attempt = run.recorded_attempts()[2]
    for video in busy.glob("*.dense.*"):
        video.unlink()
    with only_writer(busy), pytest.raises(BusyError, match="another process is still writing here"):
        make_dense(attempt, ("wrist",), no_renderer, patience_s=0.1)


def test_following_goes_on_until_the_run_is_over(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prerendering, "LOOK_AGAIN_S", 0.02)
    monkeypatch.setattr(prerendering, "OVER_AFTER_S", 0.2)
    renderer, reports = PaintedRenderer(), list[PrerenderReport]()
    options = PrerenderOptions(follow=True)
    with RunStore(database_url(run_dir), run_dir.name) as store, Recorder(run_dir) as recorder:
        worker = threading.Thread(target=lambda: reports.append(render(run_dir, renderer, options)))
        worker.start()
        while renderer.num_loads < 5:
            time.sleep(0.01)
        time.sleep(0.3)  # longer than it waits for a run that is over
        add_try(store, recorder, Try(key=(9, 1, 1), num_frames=6), 9, images_every=4, image_size=32)
        while renderer.num_loads < 6:
            assert worker.is_alive()
            time.sleep(0.01)
    worker.join()
    assert reports[0].num_rendered == 6
