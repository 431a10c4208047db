"""Pictures rendered from the recorded files are the pictures that were rendered live, by hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from dayshift.dataset_export import attempt_files as files
from dayshift.dataset_export.recorder import Recorder
from dayshift.sim.libero_env import LiberoEnv
from dayshift.sim.render import FrameRenderer
from dayshift.sim.rollout import rollout
from dayshift.sim.types import Action, Frame, Observation, RolloutSpec


class Wave:
    """Moves the arm about, differently at every step."""

    def reset(self, spec: RolloutSpec) -> None:
        self._rng = np.random.default_rng(spec.seed)

    def act(self, observation: Observation) -> Action:
        return self._rng.uniform(-1, 1, 7).astype(np.float32)


def digest(image: np.ndarray) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()


def test_deferred_equals_live(tmp_path: Path) -> None:
    spec = RolloutSpec(
        task="put the bowl on the plate",
        init_state_id=4,
        seed=5,
        max_steps=12,
        instruction="put the bowl on the plate",
        camera_hz=5.0,
        image_size=64,
    )
    live: dict[tuple[int, str], str] = {}
    recorder = Recorder(tmp_path)

    def on_frame(frame: Frame) -> None:
        live.update({(frame.index, camera): digest(image) for camera, image in frame.images.items()})
        recorder.on_frame("a", 0.05 * frame.index, frame)

    env = LiberoEnv()
    rollout(env, Wave(), spec, lambda spec, start: recorder.on_start("a", spec, start), on_frame)
    env.close()
    recorder.on_end("a")
    recorder.close()

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
