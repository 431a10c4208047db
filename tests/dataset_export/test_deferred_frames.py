"""Pictures rendered from the recorded files are the pictures that were rendered live, by hash."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from recording_samples import attempt_row, recording_row, run_row

from dayshift.dataset_export import attempt_files as files
from dayshift.dataset_export.dense_video import dense_path, missing_cameras
from dayshift.dataset_export.prerender import PrerenderProcess
from dayshift.dataset_export.recorder import Recorder, Recording
from dayshift.dataset_export.run_folder import open_run
from dayshift.dataset_export.store import RunStore, database_url
from dayshift.dataset_export.video import VideoReader
from dayshift.sim.libero_env import LiberoEnv
from dayshift.sim.render import FrameRenderer
from dayshift.sim.rollout import rollout
from dayshift.sim.types import CAMERAS, CONTROL_HZ, Action, Frame, Observation, RolloutSpec


class Wave:
    """Moves the arm about, differently at every step."""

    def reset(self, spec: RolloutSpec) -> None:
        self._rng = np.random.default_rng(spec.seed)

    def act(self, observation: Observation) -> Action:
        return self._rng.uniform(-1, 1, 7).astype(np.float32)


def digest(image: np.ndarray) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()


def make_spec(camera_hz: float) -> RolloutSpec:
    return RolloutSpec(
        task="put the bowl on the plate",
        init_state_id=4,
        seed=5,
        max_steps=12,
        instruction="put the bowl on the plate",
        camera_hz=camera_hz,
        image_size=64,
    )


@pytest.fixture(scope="module")
def env() -> Iterator[LiberoEnv]:
    env = LiberoEnv()
    yield env
    env.close()


def roll_out(
    env: LiberoEnv, recorder: Recorder, camera_hz: float, live: dict[tuple[int, str], str]
) -> Recording:
    """Record an attempt "a"; hashes of the pictures rendered live go into `live`."""

    def on_frame(frame: Frame) -> None:
        live.update({(frame.index, camera): digest(image) for camera, image in frame.images.items()})
        recorder.on_frame("a", 0.05 * frame.index, frame)

    rollout(
        env, Wave(), make_spec(camera_hz), lambda spec, start: recorder.on_start("a", spec, start), on_frame
    )
    return recorder.on_end("a")


def test_deferred_equals_live(tmp_path: Path, env: LiberoEnv) -> None:
    live: dict[tuple[int, str], str] = {}
    with Recorder(tmp_path) as recorder:
        roll_out(env, recorder, 5.0, live)

    folder = files.attempt_folder(tmp_path, "a")
    start, frames = files.read_start(folder / files.START), files.read_frames(folder / files.FRAMES)
    with FrameRenderer() as renderer:
        renderer.load(start.spec, start.start)
        deferred = {
            (index, camera): digest(image)
            for index, state in enumerate(frames.sim_state)
            for camera, image in renderer.render(index, state).items()
        }
    assert len(deferred) == 24
    assert len(live) >= 6
    assert {place: deferred[place] for place in live} == live


def test_videos_made_beside_a_run_are_the_live_ones(tmp_path: Path, env: LiberoEnv) -> None:
    """Rendered in another process while the run is still open, encoded, and compared picture by picture."""
    run_dir = tmp_path / "run-1"
    with Recorder(tmp_path / "live") as recorder:
        roll_out(env, recorder, 20.0, {})
    with Recorder(run_dir) as recorder, RunStore(database_url(run_dir), "run-1") as store:
        store.save(run_row("run-1"), recording_row("run-1", roll_out(env, recorder, 0.0, {})))
        store.save(attempt_row("run-1", "a"))
        with open_run(run_dir) as run, PrerenderProcess(run_dir, None):
            (attempt,) = run.recorded_attempts()
            while missing_cameras(attempt, CAMERAS):
                time.sleep(0.1)
    for camera in CAMERAS:
        live = files.video_path(files.attempt_folder(tmp_path / "live", "a"), camera)
        assert digests(dense_path(attempt, camera)) == digests(live)


def digests(path: Path) -> list[str]:
    with VideoReader(path, fps=CONTROL_HZ) as video:
        return [video.digest(index) for index in range(12)]
