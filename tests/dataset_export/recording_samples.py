"""Small attempts that look like real ones, for the tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dayshift.dataset_export.recorder import Recorder, Recording
from dayshift.dataset_export.store import RunStore, database_url
from dayshift.dataset_export.tables import (
    AttemptRow,
    ExchangeRow,
    JobStepRow,
    RecordingRow,
    ReviewAnswerRow,
    RobotRow,
    RunRow,
)
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


@dataclass(frozen=True, kw_only=True)
class Try:
    """An attempt to be recorded by `make_run`: [shift, job, step], number, review?, outcome, frames."""

    key: tuple[int, int, int] = (1, 1, 1)
    number: int = 1
    is_review: bool = False
    outcome: str = "done"
    num_frames: int = 12
    robot: str = "robot-0"

    @property
    def attempt_id(self) -> str:
        step = ".".join(map(str, self.key))
        return f"{self.robot}-{step}-{'r' if self.is_review else 'w'}{self.number}"

    @property
    def task(self) -> str:
        return TASKS[(self.key[1] + self.key[2]) % len(TASKS)]


TASKS = ["turn on the stove", "open the middle drawer of the cabinet", "put the bowl on the plate"]

# A step that is given up in shift 1, done in its review; others are done at once.
STORY = [
    Try(key=(1, 1, 1), outcome="failed", num_frames=15),
    Try(key=(1, 1, 1), number=2, outcome="failed", num_frames=9),
    Try(key=(1, 1, 2), num_frames=7),
    Try(key=(2, 1, 1), num_frames=20),
    Try(key=(1, 1, 1), is_review=True, num_frames=11),
]


def make_run(
    run_dir: Path, tries: Sequence[Try] = tuple(STORY), *, images_every: int = 1, image_size: int = 64
) -> Path:
    """Record a small run: every row and file that an export reads."""
    run_id = run_dir.name
    run_dir.mkdir(parents=True, exist_ok=True)
    with RunStore(database_url(run_dir), run_id) as store, Recorder(run_dir) as recorder:
        store.save(run_row(run_id))
        for robot in {one.robot for one in tries}:
            store.save(robot_row(run_id, robot))
        for number, one in enumerate(tries):
            add_try(store, recorder, one, number, images_every=images_every, image_size=image_size)
    return run_dir


def add_try(
    store: RunStore, recorder: Recorder, one: Try, number: int, *, images_every: int = 1, image_size: int = 64
) -> None:
    shift, job, step = one.key
    frames = make_frames(one.num_frames, images_every=images_every, image_size=image_size, seed=number)
    recorder.on_start(one.attempt_id, make_spec(image_size=image_size), make_start(number))
    for frame in frames:
        recorder.on_frame(one.attempt_id, 10.0 * number + 0.05 * frame.index, frame)
    recording = recorder.on_end(one.attempt_id)
    store.save(recording_row(store.run_id, recording))
    place = {"shift": shift, "job": job, "step": step, "robot": one.robot, "is_review": one.is_review}
    attempt = attempt_row(
        store.run_id,
        one.attempt_id,
        start_s=10.0 * number,
        number=one.number,
        task=one.task,
        instruction=one.task,
        outcome=one.outcome,
        num_control_steps=one.num_frames,
        **place,
    )
    store.save(attempt, *exchange_rows(store, one, place))
    if one.is_review:
        store.save(
            ReviewAnswerRow(
                run_id=store.run_id, robot=one.robot, shift=shift, is_valid=True, steps=[[shift, job, step]]
            )
        )
    gave_up = one.outcome == "failed" and one.number == 2
    state = "done" if one.outcome == "done" else "given_up" if gave_up else "running"
    store.save(
        JobStepRow(
            run_id=store.run_id,
            task=one.task,
            state=state,
            num_attempts=one.number,
            reason="attempts" if gave_up else None,
            **place,
        )
    )


def exchange_rows(store: RunStore, one: Try, place: dict[str, Any]) -> list[ExchangeRow]:
    """The command that led to the attempt, and what was said about its result."""
    idx = len(store.rows(ExchangeRow, robot=one.robot))
    shift, job, step = one.key
    rows = []

    def add(message: str, reply: dict[str, Any], num_attempts: int, **changes: Any) -> None:
        fields = place | {
            "run_id": store.run_id,
            "idx": idx + len(rows) + 1,
            "at": float(idx),
            "num_attempts": num_attempts,
            "is_repair": False,
            "message": message,
            "reply": json.dumps(reply, separators=(",", ":")),
            "finish_reason": "stop",
            "ledger": {"computed": 30, "recalled": 400 if one.is_review else 0},
        }
        rows.append(ExchangeRow(**fields | changes))

    if one.is_review:
        redo = {"redo": [{"job": job, "step": step, "task": one.task}]}
        add(
            f"Review of shift {shift}: list every step given up in shift {shift}.",
            redo,
            0,
            job=None,
            step=None,
        )
    if one.number == 1:
        add(f"Shift {shift}, job {job}, step {step}: {one.task}.", {"action": "execute", "task": one.task}, 0)
    if one.outcome == "done":
        add("Result: done.", {"action": "next"}, one.number)
    elif one.number == 2:
        give_up = {"action": "give_up", "shift": shift, "job": job, "step": step, "task": one.task}
        add("Result: failed, attempt 2 of 2.", give_up, 2)
    else:
        add("Result: failed, attempt 1 of 2.", {"action": "execute", "task": one.task}, 1)
    return rows


def robot_row(run_id: str, robot: str) -> RobotRow:
    return RobotRow(
        run_id=run_id,
        robot=robot,
        kind="live",
        policy="scripted_expert",
        planner_model="planner-small",
        planner_memory="recall_kv",
        session_id=f"session-{robot}",
    )


class PaintedRenderer:
    """Draws what `make_frames` would have rendered live, from the same recorded attempt."""

    def __init__(self) -> None:
        self.num_loads = 0

    def __enter__(self) -> PaintedRenderer:
        return self

    def __exit__(self, *_: object) -> None: ...

    def load(self, spec: RolloutSpec, start: RolloutStart) -> None:
        self.num_loads += 1
        seed = next(n for n in range(999) if np.array_equal(start.sim_state, make_start(n).sim_state))
        self._frames = make_frames(300, images_every=1, image_size=spec.image_size, seed=seed)

    def render(
        self, frame_index: int, sim_state: np.ndarray, cameras: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        images = self._frames[frame_index].images
        return {camera: images[camera] for camera in cameras or images}
