"""The database of a run: one mapped dataclass per table.

Every table starts with `run_id`, so that one PostgreSQL database holds many runs; a run's own SQLite
file holds one. Times are seconds on the run clock unless a name says otherwise. Steps are identified
by (shift, job, step), never by their sentence.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import JSON, Index, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column

FORMAT = 1  # raised when a table changes in a way that older readers cannot read


class Row(MappedAsDataclass, DeclarativeBase, kw_only=True):
    """Base of all tables; a row is an ordinary dataclass until it is saved."""

    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy's own protocol)
        dict[str, Any]: JSON,
        list[Any]: JSON,
    }
    order_by: ClassVar[tuple[str, ...]] = ()  # columns that give the rows' order; default: the key


class RunRow(Row):
    """The run: what was asked for and what it ran on."""

    __tablename__ = "runs"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    created_at: Mapped[str]  # ISO 8601, UTC
    fps: Mapped[int]  # control steps per second of every recording
    config_yaml: Mapped[str] = mapped_column(Text)  # as resolved
    git_revision: Mapped[str | None]
    versions: Mapped[dict[str, Any]]  # package -> version, and the simulator's protocol
    seeds: Mapped[dict[str, Any]]
    format: Mapped[int] = mapped_column(default=FORMAT)


class RobotRow(Row):
    """A robot of the run. `kind`: "live" or "replay"; `policy`: what chooses its actions."""

    __tablename__ = "robots"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    robot: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    policy: Mapped[str]
    planner_model: Mapped[str]
    planner_memory: Mapped[str]
    session_id: Mapped[str | None] = mapped_column(default=None)  # the planner's session in the engine


class JobStepRow(Row):
    """State of a job step, in its shift or (is_review) in the review that redoes it."""

    __tablename__ = "job_steps"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    robot: Mapped[str] = mapped_column(primary_key=True)
    shift: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    is_review: Mapped[bool] = mapped_column(primary_key=True)
    task: Mapped[str]
    state: Mapped[str]  # pending, running, done, given_up, cancelled
    num_attempts: Mapped[int] = mapped_column(default=0)
    num_infra_attempts: Mapped[int] = mapped_column(default=0)
    reason: Mapped[str | None] = mapped_column(default=None)  # why it was given up


class ShiftRow(Row):
    """Hours of a shift, or of its review; `end_s` is None while it runs."""

    __tablename__ = "shifts"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    robot: Mapped[str] = mapped_column(primary_key=True)
    shift: Mapped[int] = mapped_column(primary_key=True)
    is_review: Mapped[bool] = mapped_column(primary_key=True)
    start_s: Mapped[float]
    end_s: Mapped[float | None] = mapped_column(default=None)


class AttemptRow(Row):
    """An attempt that has ended. Its recording, if the simulator got that far, has a row of its own."""

    __tablename__ = "attempts"
    order_by = ("start_s", "attempt_id")

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt_id: Mapped[str] = mapped_column(primary_key=True)
    robot: Mapped[str]
    shift: Mapped[int]
    job: Mapped[int]
    step: Mapped[int]
    number: Mapped[int]  # from 1, anew in a review
    is_review: Mapped[bool]
    task: Mapped[str]  # the step's sentence
    instruction: Mapped[str]  # the sentence that the planner's command carried
    outcome: Mapped[str]  # done, failed, infra
    num_control_steps: Mapped[int]
    start_s: Mapped[float]
    end_s: Mapped[float]
    detail: Mapped[str] = mapped_column(default="")


class RecordingRow(Row):
    """What was simulated for an attempt and what its files hold. Committed before the attempt's row."""

    __tablename__ = "recordings"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt_id: Mapped[str] = mapped_column(primary_key=True)
    task: Mapped[str]  # as the simulator was told
    init_state_id: Mapped[int]
    seed: Mapped[int]
    max_steps: Mapped[int]
    protocol: Mapped[dict[str, Any]]
    num_frames: Mapped[int]
    num_images: Mapped[dict[str, Any]]  # camera -> pictures rendered live
    num_bytes: Mapped[int]
    wall_s: Mapped[float]
    fault: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True), default=None)


class ExchangeRow(Row):
    """One message to the planner and its reply; `idx` counts the robot's exchanges from 1."""

    __tablename__ = "exchanges"
    __table_args__ = (Index("exchanges_by_step", "run_id", "robot", "shift", "job", "step"),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    robot: Mapped[str] = mapped_column(primary_key=True)
    idx: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    shift: Mapped[int]
    is_review: Mapped[bool]
    job: Mapped[int | None]  # None with step: a review question, not about one step
    step: Mapped[int | None]
    num_attempts: Mapped[int]  # attempts of the step that had ended when it was sent
    is_repair: Mapped[bool]
    message: Mapped[str] = mapped_column(Text)
    reply: Mapped[str] = mapped_column(Text)
    finish_reason: Mapped[str]
    ledger: Mapped[dict[str, Any]]  # engine.api.TokenLedger
    recall_start_s: Mapped[float | None] = mapped_column(default=None)
    recall_end_s: Mapped[float | None] = mapped_column(default=None)
    recalled_turns: Mapped[list[Any]] = mapped_column(default_factory=list)
    present_turns: Mapped[list[Any]] = mapped_column(default_factory=list)
    not_fitting_turns: Mapped[list[Any]] = mapped_column(default_factory=list)
    latency_s: Mapped[float] = mapped_column(default=0.0)
    num_retries: Mapped[int] = mapped_column(default=0)
    problem: Mapped[str] = mapped_column(Text, default="")
    error: Mapped[str] = mapped_column(Text, default="")


class ReviewAnswerRow(Row):
    """What the planner answered in a shift's review; steps as [shift, job, step]."""

    __tablename__ = "review_answers"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    robot: Mapped[str] = mapped_column(primary_key=True)
    shift: Mapped[int] = mapped_column(primary_key=True)
    is_valid: Mapped[bool]
    steps: Mapped[list[Any]]
    refused: Mapped[list[Any]] = mapped_column(default_factory=list)
    mismatched: Mapped[list[Any]] = mapped_column(default_factory=list)


class EventRow(Row):
    """A line of the run's log: what was published, by whom, when."""

    __tablename__ = "events"
    __table_args__ = (Index("events_by_time", "run_id", "t"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True, init=False)
    run_id: Mapped[str]
    t: Mapped[float]
    robot: Mapped[str]
    kind: Mapped[str]
    body: Mapped[dict[str, Any]]
