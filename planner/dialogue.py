"""One robot's dialogue with its planner: ask, judge the reply, repair once, record everything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dayshift.engine.api import FinishReason, RecallRange
from dayshift.planner.clients.api import PlannerClient, PlannerReply
from dayshift.planner.errors import (
    OperationStoppedError,
    PlannerCallError,
    PlannerLostError,
    PlannerUnavailableError,
    UnusableReplyError,
)
from dayshift.planner.journal import Journal
from dayshift.planner.protocol import ReplyError, repair_message
from dayshift.planner.records import Exchange
from dayshift.planner.rules import Rules
from dayshift.types import StepKey

NO_REPLY = PlannerReply(text="", finish_reason=FinishReason.ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A message to the planner, and what it is about (see `records.Exchange`)."""

    message: str
    schema: dict[str, Any]
    max_tokens: int
    shift: int
    is_review: bool
    step: StepKey | None = None
    num_attempts: int = 0
    recall_range: RecallRange | None = None
    is_repair: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """How the calls for one message went: the reply, or the last error."""

    reply: PlannerReply
    num_retries: int
    latency_s: float
    error: str = ""


class Dialogue:
    """Asks the planner, and commits each exchange before its answer is used."""

    def __init__(self, planner: PlannerClient, journal: Journal, rules: Rules, stop: threading.Event) -> None:
        self._planner = planner
        self._journal = journal
        self._rules = rules
        self._stop = stop
        self._num_outages = 0

    def ask[T](self, question: Question, read: Callable[[str], T]) -> T:
        """The planner's answer, as `read` understands it.

        `read` raises ReplyError for a reply that cannot be used; the planner is told why and asked
        again. Raises UnusableReplyError when that does not help, PlannerUnavailableError when there
        is no reply, PlannerLostError when that happens too often in a row, and OperationStoppedError.
        """
        num_repairs = 0
        while True:
            exchange = self._recorded(question) or self._send(question, read)
            if exchange.error:
                raise PlannerUnavailableError(exchange.error)
            if not exchange.problem:
                return read(exchange.reply)
            if num_repairs == self._rules.max_repairs:
                raise UnusableReplyError(exchange.problem)
            num_repairs += 1
            question = replace(question, message=repair_message(exchange.problem), is_repair=True)

    def _recorded(self, question: Question) -> Exchange | None:
        place = (question.shift, question.is_review, question.step)
        return self._journal.recorded_exchange(place, question.message)

    def _send(self, question: Question, read: Callable[[str], Any]) -> Exchange:
        """Send one message, and commit what came back."""
        at = self._journal.clock.now()
        call = self._call(question, at)
        self._count_outage(call.error)
        exchange = Exchange(
            robot=self._journal.robot,
            index=self._journal.next_exchange_index,
            shift=question.shift,
            is_review=question.is_review,
            step=question.step,
            num_attempts=question.num_attempts,
            is_repair=question.is_repair,
            at=at,
            message=question.message,
            reply=call.reply.text,
            finish_reason=call.reply.finish_reason,
            ledger=call.reply.ledger,
            recall_range=question.recall_range,
            recalled_turns=call.reply.recalled_turns,
            present_turns=call.reply.present_turns,
            not_fitting_turns=call.reply.not_fitting_turns,
            latency_s=call.latency_s,
            num_retries=call.num_retries,
            problem="" if call.error else _find_problem(call.reply, read),
            error=call.error,
        )
        self._journal.add_exchange(exchange)
        return exchange

    def _call(self, question: Question, at: float) -> _Call:
        """Call the planner until it answers or the retries are used up."""
        delays_s = self._rules.planner_retry_delays_s
        num_retries = 0
        while True:
            if self._stop.is_set():
                raise OperationStoppedError(f"robot {self._journal.robot}: stopped")
            called_at = time.perf_counter()
            try:
                reply = self._planner.ask(
                    question.message,
                    at=at,
                    schema=question.schema,
                    max_tokens=question.max_tokens,
                    recall_range=question.recall_range,
                )
            except PlannerCallError as error:
                latency_s = time.perf_counter() - called_at
                if num_retries == len(delays_s) or not error.is_transient:
                    return _Call(
                        reply=NO_REPLY, num_retries=num_retries, latency_s=latency_s, error=str(error)
                    )
                self._stop.wait(delays_s[num_retries])
                num_retries += 1
            else:
                latency_s = time.perf_counter() - called_at
                return _Call(reply=reply, num_retries=num_retries, latency_s=latency_s)

    def _count_outage(self, error: str) -> None:
        """Stop the operation, with nothing recorded of this question, when the planner seems lost."""
        self._num_outages = self._num_outages + 1 if error else 0
        if self._num_outages >= self._rules.max_planner_outages:
            raise PlannerLostError(
                f"robot {self._journal.robot}: no reply from the planner to "
                f"{self._num_outages} questions in a row ({error}); the run can be resumed"
            )


def _find_problem(reply: PlannerReply, read: Callable[[str], Any]) -> str:
    """Why a reply cannot be used, in words for the planner; "" when it can."""
    match reply.finish_reason:
        case FinishReason.LENGTH:
            return "it was cut off"
        case FinishReason.STOP:
            try:
                read(reply.text)
            except ReplyError as error:
                return str(error)
            return ""
        case finish_reason:
            return f"it ended early ({finish_reason})"
