"""Runs that are made by the real recorder, store and series writer, without simulating anything."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict
from itertools import batched
from pathlib import Path

import numpy as np

from dayshift.dataset_export.recorder import Recorder
from dayshift.dataset_export.store import RunStore, database_url
from dayshift.dataset_export.tables import (
    AttemptRow,
    ExchangeRow,
    JobStepRow,
    RecordingRow,
    RobotRow,
    Row,
    RunRow,
    ShiftRow,
)
from dayshift.engine.api import TokenLedger
from dayshift.sim.types import CONTROL_HZ, Frame, RolloutSpec, RolloutStart
from dayshift.webui.series import SeriesWriter

TASKS = (
    "turn on the stove",
    "put the bowl on the stove",
    "put the bowl on the plate",
    "open the middle drawer",
)
IMAGE_SIZE = 64


def make_spec(image_size: int = IMAGE_SIZE) -> RolloutSpec:
    return RolloutSpec(
        task="turn_on_the_stove",
        init_state_id=3,
        seed=11,
        max_steps=300,
        instruction="turn on the stove",
        camera_hz=4.0,
        image_size=image_size,
    )


def make_start() -> RolloutStart:
    return RolloutStart(fixture_poses={}, sim_state=np.zeros(79), protocol={"mujoco": "3.3.7"})


def make_image(shade: int, index: int, image_size: int = IMAGE_SIZE) -> np.ndarray:
    """A grey picture; its left edge is white, and a bright square moves with the control step."""
    image = np.full((image_size, image_size, 3), shade, np.uint8)
    image[:, : image_size // 8] = 255
    left = 16 + index % (image_size - 24)
    image[24:32, left : left + 8] = (255, 40, 40)
    return image


def make_frame(index: int, *, num_frames: int, has_images: bool, image_size: int = IMAGE_SIZE) -> Frame:
    is_last = index == num_frames - 1
    images = (
        {"agentview": make_image(90, index, image_size), "wrist": make_image(160, index, image_size)}
        if has_images
        else {}
    )
    return Frame(
        index=index,
        sim_state=np.full(79, float(index)),
        robot_state=np.zeros(8, np.float32),
        action=np.zeros(7, np.float32),
        reward=float(is_last),
        success=is_last,
        images=images,
    )


def record_attempt(
    recorder: Recorder, row: AttemptRow, *, num_frames: int, images_every: int = 5
) -> RecordingRow:
    """Files of an attempt, its frames spread evenly over its time."""
    spec = make_spec()
    recorder.on_start(row.attempt_id, spec, make_start())
    for index in range(num_frames):
        t = row.start_s + (row.end_s - row.start_s) * index / num_frames
        has_images = images_every > 0 and index % images_every == 0
        recorder.on_frame(row.attempt_id, t, make_frame(index, num_frames=num_frames, has_images=has_images))
    done = recorder.on_end(row.attempt_id)
    return RecordingRow(
        run_id=row.run_id,
        attempt_id=row.attempt_id,
        task=spec.task,
        init_state_id=spec.init_state_id,
        seed=spec.seed,
        max_steps=spec.max_steps,
        protocol={"mujoco": "3.3.7"},
        num_frames=done.num_frames,
        num_images=done.num_images,
        num_bytes=done.num_bytes,
        wall_s=1.0,
    )


class MadeRun:
    """Builds an operation of several robots: every fourth step fails twice and is given up, then redone.

    `attempt_s` is how long an attempt takes; shifts of four steps follow each other for `operation_s`,
    then each is reviewed. Of the first `num_recorded` attempts of each robot there are files.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_robots: int = 2,
        operation_s: float = 60.0,
        attempt_s: float = 5.0,
        num_recorded: int = 3,
        num_frames: int = 40,
        images_every: int = 5,
        series_hz: float = 2.0,
    ) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.run_id = folder.name
        self.num_robots = num_robots
        self.operation_s = operation_s
        self.attempt_s = attempt_s
        self._num_recorded = num_recorded
        self._num_frames = num_frames
        self._images_every = images_every
        self._series_hz = series_hz
        self._random = random.Random(0)
        self.end_s = 0.0

    def build(self) -> Path:
        with RunStore(database_url(self.folder), self.run_id) as store, Recorder(self.folder) as recorder:
            store.save(
                self._run_row(), *(self._robot_row(number) for number in range(1, self.num_robots + 1))
            )
            for number in range(1, self.num_robots + 1):
                rows = list(self._robot(f"robot-{number}"))
                attempts = [row for row in rows if isinstance(row, AttemptRow)]
                recorded = [
                    record_attempt(
                        recorder, row, num_frames=self._num_frames, images_every=self._images_every
                    )
                    for row in attempts[: self._num_recorded]
                ]
                for some in batched([*recorded, *rows], 5000):
                    store.save(*some)
        if self._series_hz:
            self._write_series()
        return self.folder

    def _run_row(self) -> RunRow:
        return RunRow(
            run_id=self.run_id,
            name="made",
            created_at="2026-11-29T12:00:00+00:00",
            fps=CONTROL_HZ,
            config_yaml="name: made\nseed: 3\n",
            git_revision=None,
            versions={"mujoco": "3.3.7"},
            seeds={"experiment": 3},
        )

    def _robot_row(self, number: int) -> RobotRow:
        return RobotRow(
            run_id=self.run_id,
            robot=f"robot-{number}",
            kind="replay",
            policy="scripted_expert",
            planner_model="default",
            planner_memory="recall_kv",
        )

    def _robot(self, robot: str) -> Iterator[Row]:
        """All rows of one robot, in order of time."""
        self._idx = 0
        t, shift = self._random.random(), 0
        given_up: dict[int, list[tuple[int, int, str]]] = {}
        while t < self.operation_s:
            shift, start_s = shift + 1, t
            for place in range(4):
                job, step, task = place // 2 + 1, place % 2 + 1, TASKS[(shift + place) % len(TASKS)]
                fails = place == 1
                t, rows = self._step(robot, (shift, job, step), task, t, fails=fails, is_review=False)
                yield from rows
                if fails:
                    given_up.setdefault(shift, []).append((job, step, task))
            yield ShiftRow(
                run_id=self.run_id, robot=robot, shift=shift, is_review=False, start_s=start_s, end_s=t
            )
        for number in range(1, shift + 1):
            start_s = t
            listed = ",".join(
                f'{{"job":{job},"step":{step},"task":"{task}"}}' for job, step, task in given_up[number]
            )
            t, row = self._exchange(
                robot, (number, None, None), t, f"Review of shift {number}.", f'{{"redo":[{listed}]}}', True,
                num_recalled=6,
            )  # fmt: skip
            yield row
            for job, step, task in given_up[number]:
                t, rows = self._step(robot, (number, job, step), task, t, fails=False, is_review=True)
                yield from rows
            yield ShiftRow(
                run_id=self.run_id, robot=robot, shift=number, is_review=True, start_s=start_s, end_s=t
            )
        self.end_s = max(self.end_s, t)

    def _step(
        self, robot: str, key: tuple[int, int, int], task: str, t: float, *, fails: bool, is_review: bool
    ) -> tuple[float, list[Row]]:
        shift, job, step = key
        rows: list[Row] = []
        num_attempts = 2 if fails else 1
        for number in range(1, num_attempts + 1):
            t, row = self._exchange(
                robot, key, t, f"Shift {shift}, job {job}, step {step}: {task}.",
                f'{{"action":"execute","task":"{task}"}}', is_review,
            )  # fmt: skip
            rows.append(row)
            start_s, t = t, t + self.attempt_s * (0.8 + 0.4 * self._random.random())
            rows.append(
                AttemptRow(
                    run_id=self.run_id,
                    attempt_id=f"{robot}-{shift}.{job}.{step}-{'r' if is_review else 'w'}{number}",
                    robot=robot,
                    shift=shift,
                    job=job,
                    step=step,
                    number=number,
                    is_review=is_review,
                    task=task,
                    instruction=task,
                    outcome="failed" if fails else "done",
                    num_control_steps=self._num_frames,
                    start_s=start_s,
                    end_s=t,
                )
            )
        if fails:
            reply = f'{{"action":"give_up","shift":{shift},"job":{job},"step":{step},"task":"{task}"}}'
            t, row = self._exchange(robot, key, t, "Result: failed, attempt 2 of 2.", reply, is_review)
            rows.append(row)
        state = JobStepRow(
            run_id=self.run_id,
            robot=robot,
            shift=shift,
            job=job,
            step=step,
            is_review=is_review,
            task=task,
            state="given_up" if fails else "done",
            num_attempts=num_attempts,
            reason="attempts" if fails else None,
        )
        return t, [*rows, state]

    def _exchange(
        self,
        robot: str,
        key: tuple[int, int | None, int | None],
        t: float,
        message: str,
        reply: str,
        is_review: bool,
        num_recalled: int = 0,
    ) -> tuple[float, ExchangeRow]:
        self._idx += 1
        latency_s = 0.05 + 0.1 * self._random.random()
        ledger = TokenLedger(
            computed=30, reused=400, recalled=40 * num_recalled, generated=12, prefill_ms=20.0, decode_ms=25.0
        )
        shift, job, step = key
        row = ExchangeRow(
            run_id=self.run_id,
            robot=robot,
            idx=self._idx,
            at=t,
            shift=shift,
            is_review=is_review,
            job=job,
            step=step,
            num_attempts=0,
            is_repair=False,
            message=message,
            reply=reply,
            finish_reason="stop",
            ledger=asdict(ledger),
            recalled_turns=list(range(num_recalled)),
            latency_s=latency_s,
        )
        return t + latency_s, row

    def _write_series(self) -> None:
        with SeriesWriter(self.folder) as writer:
            for number in range(int(self.end_s * self._series_hz)):
                t = number / self._series_hz
                writer.append(t, {"cpu_percent": 50 + 40 * np.sin(t / 30), "batch_size": float(number % 7)})
