"""How a session begins: with new records, with those of a store, with those that another model wrote."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence

from dayshift.engine.api import (
    InvalidRequestError,
    Message,
    SessionConfig,
    SessionNotFoundError,
    TurnRequest,
)
from dayshift.engine.sessions.archive import SessionArchive
from dayshift.engine.sessions.layout import Entry, youngest_fitting
from dayshift.engine.sessions.records import SYSTEM, LayoutRecord, SessionRecord, TurnRecord
from dayshift.engine.sessions.session import Session
from dayshift.engine.sessions.session_file import StoreError
from dayshift.engine.sessions.store import SessionStore
from dayshift.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def new_record(
    session_id: str, config: SessionConfig, tokenizer: Tokenizer, *, default_window: int, max_context: int
) -> SessionRecord:
    """The record of a new session. Raises InvalidRequestError for limits that cannot be kept, and for tools
    that the chat template cannot describe in a system prompt."""
    window = config.window or min(default_window, max_context)
    budget = config.recall_budget
    if budget is None:
        budget = max(0, min(window, max_context - window))
    system = tokenizer.render_system(config.system, config.tools)
    refusal = f"the system prompt has more than {2 * window} tokens, too many for a window of {window}"
    system_token_ids = tuple(tokenizer.encode_at_most(system, window, refusal=refusal))
    if not 0 < config.low_water <= config.high_water <= 1:
        raise InvalidRequestError(
            f"low_water {config.low_water} and high_water {config.high_water}: 0 < low <= high <= 1 is needed"
        )
    if budget < 0 or window + budget > max_context:
        raise InvalidRequestError(
            f"window {window} and recall budget {budget} exceed the {max_context} tokens "
            "that this engine can hold for one session"
        )
    if len(system_token_ids) >= window * config.low_water:
        raise InvalidRequestError(
            f"the system prompt has {len(system_token_ids)} tokens, too many for a window of {window}"
        )
    return SessionRecord(
        session_id=session_id,
        system=config.system,
        system_token_ids=system_token_ids,
        window=window,
        high_water=config.high_water,
        low_water=config.low_water,
        recall_budget=budget,
        tools=config.tools,
    )


def past_turns(
    history: Sequence[tuple[float, tuple[Message, ...]]], tokenizer: Tokenizer
) -> list[TurnRecord]:
    """The records of turns that happened elsewhere."""
    return [
        TurnRecord(
            index=index,
            at=at,
            messages=messages,
            token_ids=tuple(tokenizer.encode(tokenizer.render_past_turn(messages))),
        )
        for index, (at, messages) in enumerate(history)
    ]


def turn_token_ids(request: TurnRequest, window: int, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a new turn. Raises ContextLengthExceededError for one far larger than the window."""
    if request.token_ids:
        return list(request.token_ids)
    refusal = f"the turn does not fit: it has more than {2 * window} tokens, the window is {window}"
    return tokenizer.encode_at_most(tokenizer.render_turn(request.messages), window, refusal=refusal)


def reopened(archive: SessionArchive, tokenizer: Tokenizer) -> Session:
    """A parked session from its records; turns that came after the last layout are in the window."""
    if archive.has_foreign_tokens:
        encode_again(archive, tokenizer)
    session = Session(archive, is_parked=True)
    session.computed_turns = {SYSTEM, *range(len(session.turns))}
    layout = archive.layout
    session.triggers = () if layout is None else layout.triggers
    if layout is None or not _can_be(layout, len(session.turns)):
        session.entries = youngest_fitting(
            session.sizes(), session.limits, len(session.record.system_token_ids)
        )
    else:
        newer = range(layout.num_turns, len(session.turns))
        session.entries = (
            *map(Entry, layout.window_turns),
            *(Entry(turn, is_recalled=True) for turn in layout.recalled_turns),
            *map(Entry, newer),
        )
    session.context.token_ids = session.layout_token_ids(session.entries)
    return session


def _can_be(layout: LayoutRecord, num_turns: int) -> bool:
    """Whether a session of so many turns can stand so; one that another program wrote may not."""
    window, recalled = layout.window_turns, layout.recalled_turns
    return (
        0 <= layout.num_turns <= num_turns
        and all(0 <= turn < layout.num_turns for turn in (*window, *recalled))
        and len(window) == len(set(window))
        and len(recalled) == len(set(recalled))
    )


def looked_into(store: SessionStore, session_id: str, tokenizer: Tokenizer) -> Iterator[Session]:
    """A session of a store as it stands there, closed again afterwards; none if it cannot be read, which the
    log is told, or if it was deleted since."""
    try:
        with store.peek(session_id) as file:
            yield reopened(file, tokenizer)
    except SessionNotFoundError:
        pass
    except StoreError as error:
        logger.warning("session %s is not listed: %s", session_id, error)


def encode_again(archive: SessionArchive, tokenizer: Tokenizer) -> None:
    """Another model wrote these records: its token ids mean nothing here, its text does."""
    record = archive.session
    system_token_ids = tuple(tokenizer.encode(tokenizer.render_system(record.system, record.tools)))
    archive.session = dataclasses.replace(record, system_token_ids=system_token_ids)
    for index, turn in enumerate(archive.turns):
        text = tokenizer.render_past_turn(turn.messages)
        reply = turn.reply
        if reply is not None:
            reply_ids = tokenizer.encode(turn.messages[-1].content)
            reply = dataclasses.replace(reply, token_ids=tuple(reply_ids))
        archive.turns[index] = dataclasses.replace(turn, token_ids=tuple(tokenizer.encode(text)), reply=reply)
