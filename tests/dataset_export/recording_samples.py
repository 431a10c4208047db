"""Small attempts that look like real ones, for the tests of this folder."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from dayshift.dataset_export.recorder import Recording
from dayshift.dataset_export.tables import AttemptRow, RecordingRow, RunRow
from dayshift.sim.types import Fault, Frame, RolloutSpec, RolloutStart

SIM_STATE_SIZE = 79


def make_spec(
    task: str = "turn_on_the_stove", *, image_size: int = 64, camera_hz: float = 4.0
) -> RolloutSpec:
    return RolloutSpec(
        task=task,
        init_state_id=3,
        seed=11,
        max_steps=300,
        instruction="turn on the stove",
        fault=Fault(kind="push", at_step=20, num_steps=5, strength=8.0),
        camera_hz=camera_hz,
        image_size=image_size,
    )


def make_start(seed: int = 0) -> RolloutStart:
    rng = np.random.default_rng(seed)
    return RolloutStart(
        fixture_poses={"flat_stove_1": tuple(rng.normal(size=7).tolist())},
        sim_state=rng.normal(size=SIM_STATE_SIZE),
        protocol={"mujoco": "3.3.7", "settle_steps": "10"},
    )


def make_frames(
    num_frames: int, *, images_every: int = 5, image_size: int = 64, seed: int = 0
) -> list[Frame]:
    """An attempt that ends with a success; a bright square moves through its pictures."""
    rng = np.random.default_rng(seed)
    frames = []
    for index in range(num_frames):
        images = {}
        if images_every and index % images_every == 0:
            for camera, shade in (("agentview", 90), ("wrist", 160)):
                image = np.full((image_size, image_size, 3), shade, np.uint8)
                left = (index * 3) % (image_size - 8)
                image[8:16, left : left + 8] = (255, seed % 256, index % 256)
                images[camera] = image
        is_last = index == num_frames - 1
        frames.append(
            Frame(
                index=index,
                sim_state=rng.normal(size=SIM_STATE_SIZE),
                robot_state=rng.normal(size=8).astype(np.float32),
                action=rng.uniform(-1, 1, 7).astype(np.float32),
                reward=float(is_last),
                success=is_last,
                images=images,
            )
        )
    return frames


def run_row(run_id: str, **changes: Any) -> RunRow:
    fields = {
        "run_id": run_id,
        "name": "quickstart",
        "created_at": "2026-11-29T12:00:00+00:00",
        "fps": 20,
        "config_yaml": "name: quickstart\n",
        "git_revision": "7df2860",
        "versions": {"mujoco": "3.3.7"},
        "seeds": {"operation": 1},
    }
    return RunRow(**fields | changes)


def attempt_row(run_id: str, attempt_id: str, start_s: float = 0.0, **changes: Any) -> AttemptRow:
    fields = {
        "run_id": run_id,
        "attempt_id": attempt_id,
        "robot": "robot-0",
        "shift": 1,
        "job": 1,
        "step": 1,
        "number": 1,
        "is_review": False,
        "task": "turn on the stove",
        "instruction": "turn on the stove",
        "outcome": "done",
        "num_control_steps": 98,
        "start_s": start_s,
        "end_s": start_s + 5,
    }
    return AttemptRow(**fields | changes)


def recording_row(run_id: str, recording: Recording) -> RecordingRow:
    spec, start = make_spec(), make_start()
    assert spec.fault is not None
    return RecordingRow(
        run_id=run_id,
        attempt_id=recording.attempt_id,
        task=spec.task,
        init_state_id=spec.init_state_id,
        seed=spec.seed,
        max_steps=spec.max_steps,
        protocol=dict(start.protocol),
        num_frames=recording.num_frames,
        num_images=recording.num_images,
        num_bytes=recording.num_bytes,
        wall_s=1.0,
        fault=asdict(spec.fault),
    )
