"""A planner in a session of our engine: only the new turn is sent, the session remembers the rest."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from dayshift.engine.api import (
    EngineError,
    FinishReason,
    GenerateResult,
    Message,
    RecallMode,
    RecallRange,
    SamplingParams,
    SessionConfig,
    SessionInfo,
    SessionNotFoundError,
    TurnRequest,
)
from dayshift.planner.clients.api import PlannerReply
from dayshift.planner.errors import PlannerCallError
from dayshift.planner.memory import MemoryArm
from dayshift.planner.records import Exchange

RECALL_MODES = {
    MemoryArm.WINDOW: RecallMode.OFF,
    MemoryArm.RECALL_TEXT: RecallMode.TEXT,
    MemoryArm.RECALL_KV: RecallMode.KV,
}

PASSING_STATUSES = {404, 408, 409, 429}  # session lost, time-out, call in flight, too many calls

Turn = tuple[float, tuple[Message, ...]]  # as in SessionConfig.history


class SessionApi(Protocol):
    """The session calls of an engine, over HTTP or in the same process. Errors are EngineErrors."""

    def open_session(self, config: SessionConfig) -> SessionInfo: ...

    def session(self, session_id: str) -> SessionInfo: ...

    def turn(self, request: TurnRequest) -> GenerateResult: ...

    def close_session(self, session_id: str) -> None: ...


class SessionClient:
    """The memory arms window, recall_text and recall_kv.

    The session's id is "{prefix}-{robot}", so that a resumed run finds it again. Whenever the session
    may have lost or gained a turn (a resumed run, an engine that was restarted, a call without a
    reply), its turns are compared with those known here; if they differ, it is made anew from these.
    A turn whose reply was lost is the exception: asked again, it brings its recorded reply.
    """

    def __init__(
        self,
        engine: SessionApi,
        *,
        arm: MemoryArm,
        system: str,
        session_prefix: str,
        window: int | None = None,
        recall_budget: int | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> None:
        self._engine = engine
        self._recall_mode = RECALL_MODES[arm]
        self._system = system
        self._session_prefix = session_prefix
        self._window = window
        self._recall_budget = recall_budget
        self._sampling = SamplingParams(temperature=temperature, seed=seed)
        self._session_id = ""
        self._turns: list[Turn] = []
        self._is_in_doubt = True
        self._unanswered: TurnRequest | None = None  # sent, and no reply came

    @property
    def session_id(self) -> str:
        """The session's id on the engine, once opened."""
        return self._session_id

    def open(self, robot: str, history: Sequence[Exchange]) -> None:
        self._session_id = f"{self._session_prefix}-{robot}"
        self._turns = [_turn(exchange.at, exchange.message, exchange.reply) for exchange in history]
        try:
            self._make_sure_of_session()
        except EngineError as error:
            raise _call_error(error) from error

    def ask(
        self,
        message: str,
        *,
        at: float,
        schema: dict[str, Any],
        max_tokens: int,
        recall_range: RecallRange | None = None,
    ) -> PlannerReply:
        request = TurnRequest(
            request_id=uuid.uuid4().hex,
            session_id=self._session_id,
            at=at,
            messages=(Message("user", message),),
            sampling=replace(self._sampling, json_schema=schema, max_tokens=max_tokens),
            recall_range=None if self._recall_mode is RecallMode.OFF else recall_range,
            recall_mode=self._recall_mode,
        )
        lost = self._unanswered
        if lost is not None and replace(request, request_id=lost.request_id) == lost:
            request = lost
        self._unanswered = request
        try:
            if self._is_in_doubt:
                self._make_sure_of_session(request.request_id)
            self._is_in_doubt = True  # until the reply is here
            result = self._engine.turn(request)
        except EngineError as error:
            raise _call_error(error) from error
        if result.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise PlannerCallError(f"the engine ended the turn ({result.finish_reason})", is_transient=True)
        self._turns.append(_turn(at, message, result.text))
        self._is_in_doubt = False
        self._unanswered = None
        return PlannerReply(
            text=result.text,
            finish_reason=result.finish_reason,
            ledger=result.ledger,
            recalled_turns=result.recalled_turns,
            present_turns=result.present_turns,
            not_fitting_turns=result.not_fitting_turns,
        )

    def close(self) -> None:
        """The engine's client belongs to the caller; the session stays, for a resumed run."""

    def _make_sure_of_session(self, asked_again: str | None = None) -> None:
        """Leave the engine with a session of exactly the known turns.

        The turn of the request `asked_again` may follow them: it was taken, and its reply was lost.
        """
        try:
            info = self._engine.session(self._session_id)
        except SessionNotFoundError:
            self._open_session()
        else:
            turns = list(info.turns)
            if asked_again is not None and turns and turns[-1].request_id == asked_again:
                del turns[-1]
            if [turn.at for turn in turns] != [at for at, _ in self._turns]:
                self._engine.close_session(self._session_id)
                self._open_session()
        self._is_in_doubt = False

    def _open_session(self) -> None:
        self._engine.open_session(
            SessionConfig(
                session_id=self._session_id,
                system=self._system,
                window=self._window,
                recall_budget=self._recall_budget,
                history=tuple(self._turns),
            )
        )


def _turn(at: float, message: str, reply: str) -> Turn:
    return at, (Message("user", message), Message("assistant", reply))


def _call_error(error: EngineError) -> PlannerCallError:
    is_transient = error.status >= 500 or error.status in PASSING_STATUSES
    return PlannerCallError(str(error), is_transient=is_transient)
