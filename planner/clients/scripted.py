"""A planner without a model: the oracle arm, and its counterpart that remembers nothing."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from dayshift.engine.api import FinishReason, RecallRange
from dayshift.planner.clients.api import PlannerReply
from dayshift.planner.protocol import Command, Execute, GiveUp, Next, Redo, format_reply
from dayshift.planner.records import Exchange
from dayshift.types import StepKey

_STEP = re.compile(r"(?:S|Redo of s)hift (\d+), job (\d+), step (\d+): (.*)\.")
_FAILED = re.compile(r"Result: failed, attempt (\d+) of (\d+)\.")
_REVIEW = re.compile(r"Review of shift (\d+): .*")
_REPAIR = re.compile(r"That reply cannot be used: .*")


class ScriptedPlanner:
    """Follows the protocol to the letter. Reads the planner's messages only, never a record.

    With `remembers` it answers a review with exactly what it gave up in that shift (the oracle);
    without, always with nothing (the floor that a memory is measured against).
    """

    def __init__(self, *, remembers: bool) -> None:
        self._remembers = remembers
        self._current: tuple[StepKey, str] | None = None
        self._is_redo = False
        self._given_up: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        self._last_reply = ""

    def open(self, robot: str, history: Sequence[Exchange]) -> None:
        for exchange in history:
            self._answer(exchange.message)

    def ask(
        self,
        message: str,
        *,
        at: float,
        schema: dict[str, Any],
        max_tokens: int,
        recall_range: RecallRange | None = None,
    ) -> PlannerReply:
        return PlannerReply(text=self._answer(message), finish_reason=FinishReason.STOP)

    def close(self) -> None:
        """Nothing is held."""

    def _answer(self, message: str) -> str:
        if not _REPAIR.fullmatch(message):
            self._last_reply = format_reply(self._choose(message))
        return self._last_reply

    def _choose(self, message: str) -> Command | Redo:
        if step := _STEP.fullmatch(message):
            shift, job, number, task = step.groups()
            self._current = StepKey(int(shift), int(job), int(number)), task
            self._is_redo = message.startswith("Redo")
            return Execute(task)
        if failed := _FAILED.fullmatch(message):
            attempt, limit = map(int, failed.groups())
            return self._give_up() if attempt == limit else Execute(self._current_step()[1])
        if review := _REVIEW.fullmatch(message):
            steps = self._given_up[int(review[1])] if self._remembers else []
            return Redo(tuple(steps))
        return Next()

    def _give_up(self) -> GiveUp:
        key, task = self._current_step()
        if not self._is_redo:
            self._given_up[key.shift].append((key.job, key.step, task))
        return GiveUp(key, task)

    def _current_step(self) -> tuple[StepKey, str]:
        if self._current is None:
            raise ValueError("a result came before any step")
        return self._current
