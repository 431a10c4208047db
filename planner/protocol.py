"""What the planner model is told and what it may answer: the one place that knows the wording.

Used by the loops, by the training of the default planner and by its gate, so that all three see the
same text. Replies are JSON under a grammar (`COMMAND_SCHEMA`, `REVIEW_SCHEMA`): they always parse.
The schemas are constants: nothing about outcomes ever enters a prompt of a review but the
session's own turns.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from dayshift.planner.jobs import JobStep
from dayshift.types import StepKey

Dialect = Literal["compact", "general"]

SYSTEM_PROMPTS: dict[Dialect, str] = {
    # The default planner was trained on exactly this line.
    "compact": "You lead a robot through shifts of jobs.",
    # Any instruction-tuned model.
    "general": (
        "You lead one robot through shifts. A shift has jobs, a job has steps; each step is one "
        "instruction to the robot. Answer every message with exactly one JSON object and nothing "
        "else.\n"
        'When a step is given or has failed with attempts left, answer {"action":"execute","task":T} '
        "where T repeats the step's sentence word for word.\n"
        'When the result is done, answer {"action":"next"}.\n'
        "When the last attempt has failed, answer "
        '{"action":"give_up","shift":S,"job":J,"step":K,"task":T}.\n'
        "When a shift is reviewed, look back over the conversation and list every step of that shift "
        'that you gave up, in order: {"redo":[{"job":J,"step":K,"task":T}, ...]}, or {"redo":[]} if '
        "there was none. Never list a step that was done."
    ),
}


def step_message(step: JobStep) -> str:
    """A job step begins."""
    k = step.key
    return f"Shift {k.shift}, job {k.job}, step {k.step}: {step.task}."


def redo_message(step: JobStep) -> str:
    """A given-up step that the planner listed in a review is tried again."""
    k = step.key
    return f"Redo of shift {k.shift}, job {k.job}, step {k.step}: {step.task}."


def done_message() -> str:
    """The attempt succeeded."""
    return "Result: done."


def failed_message(attempt: int, max_attempts: int) -> str:
    """The attempt failed; with attempt == max_attempts it was the last one."""
    return f"Result: failed, attempt {attempt} of {max_attempts}."


def review_message(shift: int) -> str:
    """The review question."""
    return f"Review of shift {shift}: list every step given up in shift {shift}."


def repair_message(error: str) -> str:
    """Sent once after a reply that was cut off or refused, with the error told."""
    return f"That reply cannot be used: {error}. Answer again."


@dataclass(frozen=True, slots=True)
class Execute:
    """Run the current step with this instruction."""

    task: str


@dataclass(frozen=True, slots=True)
class Next:
    """The current step is done; go on."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The current step is given up."""

    key: StepKey
    task: str


@dataclass(frozen=True, slots=True)
class Redo:
    """A review's answer, in the order in which the planner listed the steps."""

    steps: tuple[tuple[int, int, str], ...]  # (job, step, task)


Command = Execute | Next | GiveUp

_STEP_ITEM = {
    "type": "object",
    "properties": {
        "job": {"type": "integer", "minimum": 1, "maximum": 99},
        "step": {"type": "integer", "minimum": 1, "maximum": 99},
        "task": {"type": "string", "maxLength": 120},
    },
    "required": ["job", "step", "task"],
    "additionalProperties": False,
}

COMMAND_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "action": {"const": "execute"},
                "task": {"type": "string", "maxLength": 120},
            },
            "required": ["action", "task"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"action": {"const": "next"}},
            "required": ["action"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {
                "action": {"const": "give_up"},
                "shift": {"type": "integer", "minimum": 1, "maximum": 999},
                "job": {"type": "integer", "minimum": 1, "maximum": 99},
                "step": {"type": "integer", "minimum": 1, "maximum": 99},
                "task": {"type": "string", "maxLength": 120},
            },
            "required": ["action", "shift", "job", "step", "task"],
            "additionalProperties": False,
        },
    ]
}

REVIEW_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"redo": {"type": "array", "items": _STEP_ITEM, "maxItems": 64}},
    "required": ["redo"],
    "additionalProperties": False,
}


class ReplyError(ValueError):
    """A reply that is no command of this protocol; the message says why, in one line."""


def format_reply(reply: Command | Redo) -> str:
    """The JSON text of a reply, compact, keys in the schema's order: what a model is trained on."""
    match reply:
        case Execute(task):
            body: dict[str, Any] = {"action": "execute", "task": task}
        case Next():
            body = {"action": "next"}
        case GiveUp(key, task):
            body = {
                "action": "give_up",
                "shift": key.shift,
                "job": key.job,
                "step": key.step,
                "task": task,
            }
        case Redo(steps):
            body = {"redo": [{"job": j, "step": k, "task": task} for j, k, task in steps]}
    return json.dumps(body, separators=(",", ":"))


def parse_command(text: str) -> Command:
    """Read a reply to a step or result message. Raises ReplyError."""
    body = _load(text)
    match body:
        case {"action": "execute", "task": str(task)}:
            return Execute(task)
        case {"action": "next"}:
            return Next()
        case {
            "action": "give_up",
            "shift": int(shift),
            "job": int(job),
            "step": int(step),
            "task": str(task),
        }:
            return GiveUp(StepKey(shift, job, step), task)
        case _:
            raise ReplyError("expected an execute, next or give_up command")


def parse_review(text: str) -> Redo:
    """Read a reply to a review message. Raises ReplyError."""
    body = _load(text)
    items = body.get("redo")
    if not isinstance(items, list):
        raise ReplyError("expected a redo list")
    steps: list[tuple[int, int, str]] = []
    for item in items:
        match item:
            case {"job": int(job), "step": int(step), "task": str(task)}:
                steps.append((job, step, task))
            case _:
                raise ReplyError("expected job, step and task in every redo item")
    return Redo(tuple(steps))


def _load(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise ReplyError(f"not valid JSON ({error.msg})") from error
    if not isinstance(body, dict):
        raise ReplyError("expected a JSON object")
    return body
