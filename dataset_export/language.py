"""What was said about an attempt, as LeRobot's language columns hold it.

`language_persistent`: texts in force from a time on: the plan (the job's steps), the subtask (the
instruction) and the memory (what earlier attempts or the review's recall say). `language_events`: the
exchanges with the planner, on the exact frame: those that led to the attempt on its first frame,
those about its result on its last.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dayshift.dataset_export.tables import AttemptRow, ExchangeRow, JobStepRow, ReviewAnswerRow


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageState:
    """A row of `language_persistent`: `content` holds from `timestamp` (s in the episode) on."""

    role: str
    content: str
    style: str  # "plan", "subtask" or "memory"
    timestamp: float = 0.0
    camera: None = None
    tool_calls: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageEvent:
    """A row of `language_events`: one message. `tool_calls` are JSON texts, OpenAI's format."""

    role: str
    content: str
    style: None = None
    camera: None = None
    tool_calls: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLanguage:
    """What was said about one attempt."""

    states: tuple[LanguageState, ...]
    first_frame: tuple[LanguageEvent, ...]
    last_frame: tuple[LanguageEvent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a robot and its planner have on record."""

    steps: Sequence[JobStepRow]
    exchanges: Sequence[ExchangeRow]
    answers: Sequence[ReviewAnswerRow]

    def leading_to(self, attempt: AttemptRow) -> list[ExchangeRow]:
        """The exchanges that led to the attempt, a review's question and answer first."""
        question = self._about(attempt, None, None, 0) if attempt.is_review else []
        return question + self._about(attempt, attempt.job, attempt.step, attempt.number - 1)

    def after(self, attempt: AttemptRow) -> list[ExchangeRow]:
        """The exchanges about the attempt's result; none when the simulator broke."""
        if attempt.outcome == "infra":
            return []
        return self._about(attempt, attempt.job, attempt.step, attempt.number)

    def _about(
        self, attempt: AttemptRow, job: int | None, step: int | None, num_attempts: int
    ) -> list[ExchangeRow]:
        wanted = (attempt.shift, attempt.is_review, job, step, num_attempts)
        return [
            row
            for row in self.exchanges
            if (row.shift, row.is_review, row.job, row.step, row.num_attempts) == wanted and not row.error
        ]

    def language(self, attempt: AttemptRow) -> EpisodeLanguage:
        """The language of the attempt's episode."""
        states = [
            LanguageState(role="assistant", style="plan", content=self._plan(attempt)),
            LanguageState(role="assistant", style="subtask", content=attempt.instruction),
        ]
        if memory := self._memory(attempt):
            states.append(LanguageState(role="assistant", style="memory", content=memory))
        return EpisodeLanguage(
            states=tuple(states),
            first_frame=_events(self.leading_to(attempt)),
            last_frame=_events(self.after(attempt)),
        )

    def _plan(self, attempt: AttemptRow) -> str:
        steps = [
            f"{row.step}. {row.task}"
            for row in self.steps
            if (row.shift, row.job, row.is_review) == (attempt.shift, attempt.job, False)
        ]
        return f"Shift {attempt.shift}, job {attempt.job}: {'; '.join(steps)}."

    def _memory(self, attempt: AttemptRow) -> str:
        """What the planner knew of earlier tries: its own list in a review, failed attempts."""
        known = [
            f"Given up in shift {answer.shift}: {'; '.join(map(self._name, answer.steps))}."
            for answer in self.answers
            if attempt.is_review and answer.shift == attempt.shift
        ]
        if attempt.number > 1:
            known.append(f"Failed attempts before this one: {attempt.number - 1}.")
        return " ".join(known)

    def _name(self, key: list[int]) -> str:
        shift, job, step = key
        for row in self.steps:
            if [row.shift, row.job, row.step] == key:
                return f"job {job}, step {step}: {row.task}"
        return f"job {job}, step {step} (not in the plan of shift {shift})"


def _events(exchanges: Sequence[ExchangeRow]) -> tuple[LanguageEvent, ...]:
    events = []
    for exchange in exchanges:
        events.append(LanguageEvent(role="user", content=exchange.message))
        events.append(
            LanguageEvent(role="assistant", content=exchange.reply, tool_calls=tool_calls(exchange.reply))
        )
    return tuple(events)


def tool_calls(reply: str) -> tuple[str, ...] | None:
    """The planner's command as an OpenAI tool call, in JSON; None for a reply that is no command."""
    try:
        body = json.loads(reply)
    except json.JSONDecodeError:
        return None
    match body:
        case {"action": str(name), **arguments}:
            pass
        case {"redo": list(steps)}:
            name, arguments = "redo", {"steps": steps}
        case _:
            return None
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return (json.dumps(call, ensure_ascii=False),)


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


_NUMBER, _TEXT = {"type": "integer"}, {"type": "string"}
TOOLS = [
    _tool("execute", "Run the current step with this instruction.", task=_TEXT),
    _tool("next", "The current step is done; go on."),
    _tool("give_up", "Give up the current step.", shift=_NUMBER, job=_NUMBER, step=_NUMBER, task=_TEXT),
    _tool(
        "redo",
        "Try the steps again that were given up in the shift under review.",
        steps={
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"job": _NUMBER, "step": _NUMBER, "task": _TEXT},
                "required": ["job", "step", "task"],
            },
        },
    ),
]
