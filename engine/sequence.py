"""A running request: its context, its output so far, and what it may still take."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from dayshift.engine.api import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenLedger,
    TokenLogprob,
    TurnRequest,
)
from dayshift.engine.block_pool import Context
from dayshift.engine.output import OutputText

if TYPE_CHECKING:
    from dayshift.engine.sampler import RequestSampler
    from dayshift.engine.sessions.session import Session
    from dayshift.engine.speculation.drafting import Drafting


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    RUNNING = auto()
    CLOSING = auto()  # answered; the KV of a session turn's last tokens is still to be computed
    FINISHED = auto()


@dataclass(slots=True)
class LedgerCounts:
    """The counts of one call as they come together; see `TokenLedger`."""

    computed: int = 0
    recomputed: int = 0
    reused: int = 0
    restored: int = 0
    recalled: int = 0
    restored_bytes: int = 0
    recalled_bytes: int = 0
    restore_ms: float = 0.0
    recall_ms: float = 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine. `session` is set for a turn of a session."""

    request: GenerateRequest | TurnRequest
    context: Context
    new_token_ids: list[int]  # the prompt, or the session's new turn
    output: OutputText
    sampler: RequestSampler
    session: Session | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    counts: LedgerCounts = field(default_factory=LedgerCounts)
    asked_turns: tuple[int, ...] | None = None  # None: not looked for yet
    recalled_turns: tuple[int, ...] = ()
    kept_turns: tuple[int, ...] = ()
    present_turns: tuple[int, ...] = ()
    not_fitting_turns: tuple[int, ...] = ()
    submitted_at: float = field(default_factory=time.monotonic)
    restore_began_at: float = 0.0  # when its session's KV was first asked for
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    drafting: Drafting | None = None  # None: nothing was drafted for it yet

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_uncomputed(self) -> int:
        """Tokens of the context whose KV is still to be computed."""
        return len(self.context.token_ids) - self.context.num_computed

    def ledger(self) -> TokenLedger:
        """The call's counts and times, now that it is answered."""
        return TokenLedger(
            **asdict(self.counts),
            generated=len(self.output_ids),
            prefill_ms=(self.first_token_at - self.admitted_at) * 1e3,
            decode_ms=(time.monotonic() - self.first_token_at) * 1e3,
        )

    @property
    def is_closing(self) -> bool:
        return self.status is SequenceStatus.CLOSING

    @property
    def is_decoding(self) -> bool:
        """The prompt is computed; one token a step from here."""
        return bool(self.output_ids) and self.status is SequenceStatus.RUNNING
