"""Responses and conversations that clients may come back to, in SQLite: beside the sessions' store, or
in memory where there is none. Bounded: the oldest responses go first."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dayshift.engine.api import Message
from dayshift.engine.server.errors import ParameterError

MAX_RESPONSES = 20_000

_SCHEMA = """
create table if not exists responses (
    number integer primary key autoincrement,
    id text unique not null,
    previous_id text,
    conversation_id text,
    session_id text,
    instructions text,
    messages blob not null,
    body blob
) strict;
create index if not exists responses_by_session on responses (session_id);
create index if not exists responses_by_conversation on responses (conversation_id);
create index if not exists responses_by_previous on responses (previous_id);
create table if not exists conversations (
    id text primary key,
    created_at integer not null,
    metadata blob not null,
    last_response_id text
) strict;
"""
_SESSIONS_BEHIND = """
with recursive behind (id, session_id) as (
    select id, session_id from responses where id = ?
    union select r.id, r.session_id from responses r join behind on r.previous_id = behind.id
)
select distinct session_id from behind where session_id is not null
"""
_decode_messages = msgspec.json.Decoder(tuple[Message, ...]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response and what it answered.

    `messages` are the input of this call and the reply. `session_id` is the engine's session that
    took the call as a turn, if one did. `body` None: items that a conversation was created with.
    """

    response_id: str
    previous_id: str | None
    conversation_id: str | None
    session_id: str | None
    instructions: str | None
    messages: tuple[Message, ...]
    body: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation; its past ends with `last_response_id`."""

    conversation_id: str
    created_at: int
    metadata: dict[str, str]
    last_response_id: str | None


class ResponseStore:
    """Not thread-safe: the server's event loop uses it."""

    def __init__(self, path: Path | None, *, max_responses: int = MAX_RESPONSES) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._max_responses = max_responses
        self._db = sqlite3.connect(":memory:" if path is None else path)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = normal")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def add(self, response: StoredResponse) -> set[str]:
        """Keep a response, as its conversation's last one; sessions that nothing leads to any more."""
        with self._db:
            self._db.execute(
                "insert into responses (id, previous_id, conversation_id, session_id, instructions, "
                "messages, body) values (?, ?, ?, ?, ?, ?, ?)",
                (
                    response.response_id,
                    response.previous_id,
                    response.conversation_id,
                    response.session_id,
                    response.instructions,
                    msgspec.json.encode(response.messages),
                    None if response.body is None else msgspec.json.encode(response.body),
                ),
            )
            self._db.execute(
                "update conversations set last_response_id = ? where id = ?",
                (response.response_id, response.conversation_id),
            )
            return self._delete("number <= (select max(number) from responses) - ?", (self._max_responses,))

    def find(self, response_id: str) -> StoredResponse | None:
        """The response of this id, unless it was deleted."""
        found = self._link(response_id)
        return found if found is not None and found.messages else None

    def _link(self, response_id: str) -> StoredResponse | None:
        """The response of this id, without messages if it was deleted: others follow it."""
        row = self._db.execute(
            "select id, previous_id, conversation_id, session_id, instructions, messages, body "
            "from responses where id = ?",
            (response_id,),
        ).fetchone()
        if row is None:
            return None
        body = None if row[6] is None else msgspec.json.decode(row[6])
        return StoredResponse(
            response_id=row[0],
            previous_id=row[1],
            conversation_id=row[2],
            session_id=row[3],
            instructions=row[4],
            messages=_decode_messages(row[5]),
            body=body,
        )

    def past(self, response: StoredResponse) -> list[tuple[Message, ...]]:
        """The messages of each call up to a response, oldest first, without those that were deleted, and
        without what tools returned to calls in these.

        Raises ParameterError if a response in between is kept no longer.
        """
        turns = [response.messages]
        while response.previous_id is not None:
            previous = self._link(response.previous_id)
            if previous is None:
                raise ParameterError(
                    "previous_response_id", f"{response.previous_id}, which came before it, is kept no longer"
                )
            response = previous
            turns.append(response.messages)
        return _without_orphans(turns[::-1])

    def delete(self, response_id: str) -> set[str]:
        """Forget a response: its input, its output, and the sessions that have them, which are returned. What
        follows it goes on without it."""
        found = self._link(response_id)
        if found is None:
            return set()
        kept = found
        while kept is not None and (kept is found or not kept.messages):
            kept = None if kept.previous_id is None else self._link(kept.previous_id)
        sessions = {session_id for (session_id,) in self._db.execute(_SESSIONS_BEHIND, (response_id,))}
        with self._db:
            self._db.execute(
                "update responses set messages = ?, body = null, session_id = null, instructions = null "
                "where id = ?",
                (msgspec.json.encode(()), response_id),
            )
            self._db.execute(
                "update conversations set last_response_id = ? where last_response_id = ?",
                (None if kept is None else kept.response_id, response_id),
            )
        return sessions

    def add_conversation(self, conversation: Conversation) -> None:
        """Keep a conversation."""
        with self._db:
            self._db.execute(
                "insert into conversations values (?, ?, ?, ?)",
                (
                    conversation.conversation_id,
                    conversation.created_at,
                    msgspec.json.encode(conversation.metadata),
                    conversation.last_response_id,
                ),
            )

    def find_conversation(self, conversation_id: str) -> Conversation | None:
        """The conversation of this id."""
        row = self._db.execute("select * from conversations where id = ?", (conversation_id,)).fetchone()
        if row is None:
            return None
        return Conversation(
            conversation_id=row[0],
            created_at=row[1],
            metadata=msgspec.json.decode(row[2]),
            last_response_id=row[3],
        )

    def delete_conversation(self, conversation_id: str) -> set[str]:
        """Forget a conversation and its responses; the sessions that nothing leads to any more."""
        with self._db:
            self._db.execute("delete from conversations where id = ?", (conversation_id,))
            return self._delete("conversation_id = ?", (conversation_id,))

    def _delete(self, condition: str, values: tuple[Any, ...]) -> set[str]:
        """`condition` is one of this class's own."""
        rows = self._db.execute(f"select session_id from responses where {condition}", values).fetchall()
        sessions = {session_id for (session_id,) in rows if session_id is not None}
        self._db.execute(f"delete from responses where {condition}", values)
        return {session_id for session_id in sessions if not self._has_session(session_id)}

    def _has_session(self, session_id: str) -> bool:
        found = self._db.execute("select 1 from responses where session_id = ? limit 1", (session_id,))
        return found.fetchone() is not None


def _without_orphans(turns: list[tuple[Message, ...]]) -> list[tuple[Message, ...]]:
    """The turns without results of calls that are not there, and without turns of which nothing is left."""
    calls: set[str] = set()
    kept: list[tuple[Message, ...]] = []
    for turn in turns:
        calls |= {call.call_id for message in turn for call in message.tool_calls}
        messages = tuple(m for m in turn if m.tool_call_id is None or m.tool_call_id in calls)
        if messages:
            kept.append(messages)
    return kept


def now() -> int:
    """Unix time in seconds, as OpenAI's objects carry it."""
    return int(time.time())
