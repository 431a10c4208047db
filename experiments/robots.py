"""A robot of the run: carries out the planner's attempts in its simulator, and has them recorded."""

from __future__ import annotations

import threading
from dataclasses import asdict

from dayshift.dataset_export.store import RunStore
from dayshift.dataset_export.tables import RecordingRow
from dayshift.dataset_export.writer_process import RecorderProcess
from dayshift.experiments.config import Experiment
from dayshift.experiments.plan import rollout_spec
from dayshift.planner.errors import OperationStoppedError
from dayshift.planner.jobs import Attempt, AttemptResult
from dayshift.sim.types import Frame, RolloutSpec, RolloutStart
from dayshift.sim.worker import RobotSimulator
from dayshift.types import Outcome, Publish, RunClock
from dayshift.webui.events import FrameRendered


class SimulatedRobot:
    """A `planner.crew.RobotExecutor`. `number` is the robot's, from 1."""

    def __init__(
        self,
        number: int,
        experiment: Experiment,
        *,
        simulator: RobotSimulator,
        recorder: RecorderProcess,
        rows: RunStore,
        clock: RunClock,
        publish: Publish,
        stop: threading.Event,
    ) -> None:
        self._number = number
        self._experiment = experiment
        self._simulator = simulator
        self._recorder = recorder
        self._rows = rows
        self._clock = clock
        self._publish = publish
        self._stop = stop

    def execute(self, attempt: Attempt) -> AttemptResult:
        """Roll the attempt out. Its files, then its recording's row, are durable on return.

        Raises OperationStoppedError when the run is stopped meanwhile (the attempt leaves no trace), and
        RecordingError.
        """
        spec = rollout_spec(self._experiment, self._number, attempt)
        protocol: dict[str, str] = {}
        with self._recorder.attempt(attempt.attempt_id) as recording:

            def on_start(spec: RolloutSpec, start: RolloutStart) -> None:
                protocol.update(start.protocol)
                recording.on_start(spec, start)

            def on_frame(frame: Frame) -> None:
                recording.on_frame(frame)
                if frame.images:
                    self._publish(
                        FrameRendered(
                            t=self._clock.now(),
                            robot=attempt.robot,
                            attempt_id=attempt.attempt_id,
                            index=frame.index,
                            images=frame.images,
                        )
                    )

            result = self._simulator.run(spec, on_start, on_frame, cancel=self._stop)
            if result.outcome is Outcome.INFRA and self._stop.is_set():
                raise OperationStoppedError(f"robot {attempt.robot}: stopped")
            files = recording.finish()
        if files.num_frames > 0:
            self._rows.save(
                RecordingRow(
                    run_id=self._rows.run_id,
                    attempt_id=attempt.attempt_id,
                    task=spec.task,
                    init_state_id=spec.init_state_id,
                    seed=spec.seed,
                    max_steps=spec.max_steps,
                    fault=asdict(spec.fault) if spec.fault else None,
                    protocol=protocol,
                    num_frames=files.num_frames,
                    num_images=files.num_images,
                    num_bytes=files.num_bytes,
                    wall_s=result.wall_s,
                )
            )
        return AttemptResult(
            outcome=result.outcome, num_control_steps=result.num_control_steps, detail=result.detail
        )
