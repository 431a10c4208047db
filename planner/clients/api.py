"""What the loops need of a planner, and nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dayshift.engine.api import FinishReason, RecallRange, TokenLedger
from dayshift.planner.records import Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerReply:
    """What a planner answered, and where its context came from."""

    text: str
    finish_reason: FinishReason
    ledger: TokenLedger = field(default_factory=TokenLedger)
    recalled_turns: tuple[int, ...] = ()
    present_turns: tuple[int, ...] = ()
    not_fitting_turns: tuple[int, ...] = ()


class PlannerClient(Protocol):
    """One robot's conversation with its planner.

    Used by one thread. The system prompt, the memory arm and the sampling are the client's own matter,
    given to its constructor.
    """

    def open(self, robot: str, history: Sequence[Exchange]) -> None:
        """Begin the conversation, or go on after the exchanges of `history`.

        `history` holds all exchanges that were answered so far, in order. A client whose server still
        has exactly that conversation goes on with it, otherwise it is built again from `history`.
        Raises PlannerCallError.
        """
        ...

    def ask(
        self,
        message: str,
        *,
        at: float,
        schema: dict[str, Any],
        max_tokens: int,
        recall_range: RecallRange | None = None,
    ) -> PlannerReply:
        """Send the next message, at time `at` (seconds on the run clock), and wait for the reply.

        The reply follows the JSON schema and is cut off after `max_tokens`. `recall_range` names the
        hours the question is about; the memory arm decides what is done with it. Raises
        PlannerCallError; the conversation is then as it was before the call. Returns or raises within
        the client's own time limit.
        """
        ...

    def close(self) -> None:
        """Let go of connections, also after a failed `open`. The server keeps the conversation."""
        ...
