"""What a session's file holds. The store (`store.py`) writes and reads exactly these.

Because keys are kept un-rotated, the KV of a turn does not depend on where the turn stands in the
context. So the KV of a turn is written at most once, whether it is first needed for the archive or
for parking, and a parked session is its layout (which turns, in which order) plus those pieces.

Order of a session's life in the file: `SessionRecord` once; a `TurnRecord` when a turn is committed
(durable before the reply's last chunk leaves); a KV piece when a turn is archived or its session is
parked; a `LayoutRecord` at each compaction, recall and parking. The last layout counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dayshift.engine.api import FinishReason, Message, OnMatch
from dayshift.engine.sessions.record_format import KVFormat

SYSTEM = -1  # the "turn index" of the system prompt's KV piece


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """Written once, at creation."""

    session_id: str
    system: str | None
    system_token_ids: tuple[int, ...]
    window: int
    high_water: float
    low_water: float
    recall_budget: int
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRecord:
    """What a call was answered, beside the text: for a client that lost the answer and asks again."""

    request_id: str
    token_ids: tuple[int, ...]  # as generated
    finish_reason: FinishReason
    num_prompt_tokens: int
    recalled_turns: tuple[int, ...] = ()
    kept_turns: tuple[int, ...] = ()
    present_turns: tuple[int, ...] = ()
    not_fitting_turns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """A committed turn: one user message (or several messages) and all up to the next turn.

    `token_ids` are all its tokens as they stand in the context, reply and end-of-turn included.
    """

    index: int
    at: float
    messages: tuple[Message, ...]  # reply included, as the last one
    token_ids: tuple[int, ...]
    reply: ReplyRecord | None = None  # None: the turn came as history, or by a fork


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRecord:
    """The context as it stands: system prompt, `window_turns`, then `recalled_turns`, in order.

    Turns that come after the first `num_turns` follow in the window.
    """

    num_turns: int
    window_turns: tuple[int, ...]
    recalled_turns: tuple[int, ...]
    triggers: tuple[OnMatch, ...] = ()


@dataclass(frozen=True, slots=True)
class KVPiece:
    """Raw (un-rotated) keys and the values of consecutive tokens, over all layers, as a codec wrote them.

    `data`: uint8 (num_bytes,), whose layout `format.codec` decides; see docs/session-store.md.
    """

    format: KVFormat
    data: NDArray[np.uint8]

    @property
    def num_tokens(self) -> int:
        return self.format.num_tokens
