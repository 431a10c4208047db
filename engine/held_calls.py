"""Calls of the core that wait for their grammars, while the engine goes on with its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dayshift.engine.core_messages import SubmitGenerate, SubmitTurn
from dayshift.engine.grammar import lark_of

if TYPE_CHECKING:  # torch, which the server's front does not need
    from dayshift.engine.request_intake import RequestIntake


class HeldCalls:
    """Submitted requests whose grammars are being compiled, in the order in which they came."""

    def __init__(self, intake: RequestIntake) -> None:
        self._intake = intake
        self._calls: dict[str, SubmitGenerate | SubmitTurn] = {}

    def hold(self, call: SubmitGenerate | SubmitTurn) -> bool:
        """Keep a call, if it has to wait."""
        if self._intake.is_ready(call.request):
            return False
        self._calls[call.request.request_id] = call
        return True

    def drop(self, request_id: str) -> None:
        """Nobody waits for this request any more; unknown ids are ignored."""
        call = self._calls.pop(request_id, None)
        if call is None:
            return
        grammars = [lark_of(other.request.sampling) for other in self._calls.values()]
        if lark_of(call.request.sampling) not in grammars:
            self._intake.grammars.give_up(call.request.sampling)

    def take(self) -> list[SubmitGenerate | SubmitTurn]:
        """The calls that need not wait any longer."""
        if not self._calls:
            return []
        self._intake.grammars.acknowledge()
        ready = [call for call in self._calls.values() if self._intake.is_ready(call.request)]
        for call in ready:
            del self._calls[call.request.request_id]
        return ready
