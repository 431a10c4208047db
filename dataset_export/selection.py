"""Which attempts become episodes: all facts of each, and filters over them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from dayshift.dataset_export.language import Conversation
from dayshift.dataset_export.run_folder import RecordedAttempt, RunFolder
from dayshift.types import DayshiftError, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFacts:
    """What is known of an attempt beside its frames: columns of meta/episodes and meta/attempts."""

    run_id: str
    attempt_id: str
    robot: str
    shift: int
    job: int
    step: int
    attempt: int  # the number of the try, from 1, anew in a review
    is_review: bool
    outcome: str  # done, failed or infra
    step_state: str  # how the job step ended, in its shift or in the review
    give_up_reason: str  # "" unless the step was given up
    task: str
    instruction: str  # what the policy was told
    simulator_task: str
    seed: int
    init_state_id: int
    fault: str  # its kind, "" for none
    policy: str
    planner_model: str
    planner_memory: str
    engine_session: str
    planner_calls: int  # exchanges that led to this attempt
    planner_computed_tokens: int
    planner_recalled_tokens: int
    start_s: float
    end_s: float
    num_frames: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An attempt that may become an episode."""

    facts: AttemptFacts
    recorded: RecordedAttempt
    conversation: Conversation

    @property
    def identity(self) -> tuple[str, str]:
        """(run, attempt): an attempt is exported once."""
        return (self.facts.run_id, self.facts.attempt_id)


def candidates(run: RunFolder) -> list[Candidate]:
    """Every recorded attempt of a run, in order of time."""
    robots = {row.robot: row for row in run.robots()}
    conversations = {
        robot: Conversation(
            steps=[row for row in run.job_steps() if row.robot == robot],
            exchanges=[row for row in run.exchanges() if row.robot == robot],
            answers=[row for row in run.review_answers() if row.robot == robot],
        )
        for robot in {attempt.robot for attempt in run.attempts()}
    }
    found = []
    for recorded in run.recorded_attempts():
        attempt, recording = recorded.attempt, recorded.recording
        conversation = conversations[attempt.robot]
        robot = robots[attempt.robot]
        step = next(
            (
                row
                for row in conversation.steps
                if (row.shift, row.job, row.step, row.is_review)
                == (attempt.shift, attempt.job, attempt.step, attempt.is_review)
            ),
            None,
        )
        ledgers = [exchange.ledger for exchange in conversation.leading_to(attempt)]
        facts = AttemptFacts(
            run_id=run.run.run_id,
            attempt_id=attempt.attempt_id,
            robot=attempt.robot,
            shift=attempt.shift,
            job=attempt.job,
            step=attempt.step,
            attempt=attempt.number,
            is_review=attempt.is_review,
            outcome=attempt.outcome,
            step_state=step.state if step else "",
            give_up_reason=(step.reason if step else None) or "",
            task=attempt.task,
            instruction=attempt.instruction,
            simulator_task=recording.task,
            seed=recording.seed,
            init_state_id=recording.init_state_id,
            fault=recording.fault["kind"] if recording.fault else "",
            policy=robot.policy,
            planner_model=robot.planner_model,
            planner_memory=robot.planner_memory,
            engine_session=robot.session_id or "",
            planner_calls=len(ledgers),
            planner_computed_tokens=sum(ledger.get("computed", 0) for ledger in ledgers),
            planner_recalled_tokens=sum(ledger.get("recalled", 0) for ledger in ledgers),
            start_s=attempt.start_s,
            end_s=attempt.end_s,
            num_frames=recording.num_frames,
        )
        found.append(Candidate(facts=facts, recorded=recorded, conversation=conversation))
    return found


def select(
    found: Sequence[Candidate], *, only: Sequence[Outcome] = (), where: str | None = None
) -> list[Candidate]:
    """Those with one of the outcomes `only` (default: all), for which the SQL condition `where` holds.

    `where` is an SQLite expression over the names in `AttemptFacts`: "outcome == 'failed' and shift > 2".
    Raises DayshiftError in one line when it is none.
    """
    chosen = [one for one in found if not only or one.facts.outcome in only]
    if where is None:
        return chosen
    names = [field.name for field in fields(AttemptFacts)]
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute(f"create table facts ({', '.join(names)})")
        connection.executemany(
            f"insert into facts values ({', '.join('?' * len(names))})",
            [tuple(asdict(one.facts).values()) for one in chosen],
        )
        rows = connection.execute(f"select rowid from facts where {where}").fetchall()
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise DayshiftError(f"--where {where!r}: {error}; allowed names: {', '.join(names)}") from error
    finally:
        connection.close()
    return [chosen[rowid - 1] for (rowid,) in rows]
