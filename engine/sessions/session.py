"""One conversation: its turns, what of it is in the context, and who is calling it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from dayshift.engine.api import MatchKind, OnMatch, RecallRange, SessionInfo, TurnInfo, TurnRequest, TurnState
from dayshift.engine.block_pool import Context
from dayshift.engine.sessions.archive import SessionArchive
from dayshift.engine.sessions.kv_reader import Fetch
from dayshift.engine.sessions.layout import Entry, WindowLimits
from dayshift.engine.sessions.records import SYSTEM, SessionRecord, TurnRecord
from dayshift.engine.sessions.stored_piece import StoredPiece
from dayshift.engine.sessions.triggers import is_match


@dataclass(slots=True, eq=False)
class Session:
    """A session in the engine's memory; its archive holds what must survive.

    `entries` describe the context: system prompt, then these turns. `computed_turns` are those
    whose KV has ever been computed (SYSTEM among them), which tells computed from recomputed. `read_turns`
    have KV in the pool that was read, and that is what a codec left of it.
    `sources` are the archives of the sessions that it was forked from, with the number of turns it has in
    common with each: their KV is its own, too, and is not copied.
    """

    archive: SessionArchive
    entries: tuple[Entry, ...] = ()
    context: Context = field(default_factory=Context)
    triggers: tuple[OnMatch, ...] = ()
    computed_turns: set[int] = field(default_factory=set)
    read_turns: set[int] = field(default_factory=set)
    sources: tuple[tuple[SessionArchive, int], ...] = ()
    fetch: Fetch | None = None  # KV that is read from archives for its next call
    key_means: dict[int, Tensor] = field(default_factory=dict)  # see `TurnSimilarity`
    priority: int = 0  # of its last call
    retain_until: float = 0.0  # Unix time
    num_recalls_switched: int = 0  # see `SessionInfo`
    is_parked: bool = False
    is_busy: bool = False  # a call is in flight, queued or running
    is_running: bool = False  # its call is admitted
    is_closing: bool = False  # answered; the last tokens' KV is being computed
    last_used_at: float = field(default_factory=time.monotonic)

    @property
    def record(self) -> SessionRecord:
        return self.archive.session

    @property
    def session_id(self) -> str:
        return self.record.session_id

    @property
    def turns(self) -> list[TurnRecord]:
        return self.archive.turns

    @property
    def is_idle(self) -> bool:
        return not self.is_busy and not self.is_closing

    @property
    def is_restoring(self) -> bool:
        """KV is being read for it from archives; a call waits until that is there."""
        return self.fetch is not None and not self.fetch.is_complete

    @property
    def is_ready(self) -> bool:
        """A call that waits may be admitted."""
        return not self.is_closing and not self.is_restoring

    @property
    def fetched(self) -> Mapping[int, StoredPiece]:
        """KV that was read for it and not used yet, by turn."""
        return {} if self.fetch is None else self.fetch.pieces

    @property
    def can_park(self) -> bool:
        """Its blocks may be taken; a call that still waits in the queue is no obstacle."""
        return bool(self.context.block_table) and not self.is_running and not self.is_closing

    def parking_order(self, now: float) -> tuple[bool, bool, int, float]:
        """Sessions with less of it are parked first: idle ones, those that nobody asked to retain, those
        of low priority, those used longest ago. `now` is Unix time."""
        return self.is_busy, self.retain_until > now, self.priority, self.last_used_at

    @property
    def limits(self) -> WindowLimits:
        record = self.record
        return WindowLimits(
            window=record.window,
            high_water=record.high_water,
            low_water=record.low_water,
            recall_budget=record.recall_budget,
        )

    def token_ids_of(self, turn: int) -> tuple[int, ...]:
        """Tokens of a turn, or of the system prompt (SYSTEM)."""
        return self.record.system_token_ids if turn == SYSTEM else self.turns[turn].token_ids

    def archives_of(self, turn: int) -> Iterator[SessionArchive]:
        """Where KV of a turn may be: its own archive first."""
        yield self.archive
        yield from (archive for archive, num_turns in self.sources if turn < num_turns)

    def turn_of_request(self, request_id: str) -> TurnRecord | None:
        """The turn that this call brought; None if it was not taken. The youngest are looked at first."""
        return next((t for t in reversed(self.turns) if t.reply and t.reply.request_id == request_id), None)

    def layout_token_ids(self, entries: Iterable[Entry]) -> list[int]:
        """Tokens of the system prompt and these entries, in order."""
        token_ids = list(self.record.system_token_ids)
        for entry in entries:
            token_ids += self.turns[entry.turn].token_ids
        return token_ids

    def sizes(self) -> list[int]:
        """Number of tokens of each turn."""
        return [len(turn.token_ids) for turn in self.turns]

    def asked_turns(self, request: TurnRequest) -> list[int]:
        """Turns that the call's range and the triggers on text that it matches ask for, ascending.

        Once a trigger names the range in the call, that range is recalled on a match only.
        """
        text = "\n".join(message.content for message in request.messages)
        rules = [rule for rule in self.triggers if rule.match is not MatchKind.SEMANTIC]
        matched = [rule for rule in rules if is_match(rule, text)]
        asked: set[int] = set()
        if any(rule.range_in_call for rule in matched) or not any(rule.range_in_call for rule in rules):
            asked.update(self._in_range(request.recall_range))
        for rule in matched:
            asked.update(self._in_range(rule.range))
            if rule.last_n is not None:
                asked.update(self.archived_turns()[-rule.last_n :])
        return sorted(asked)

    def info(self) -> SessionInfo:
        """What `GET /v1/sessions/{id}` shows."""
        in_window = {entry.turn for entry in self.entries if not entry.is_recalled}
        recalled = {entry.turn for entry in self.entries if entry.is_recalled}
        sizes = self.sizes()
        num_system = len(self.record.system_token_ids)

        def state(turn: int) -> TurnState:
            if turn in in_window:
                return TurnState.WINDOW
            return TurnState.RECALLED if turn in recalled else TurnState.ARCHIVED

        return SessionInfo(
            session_id=self.session_id,
            window=self.record.window,
            is_parked=self.is_parked,
            is_busy=self.is_busy,
            num_system_tokens=num_system,
            num_window_tokens=num_system + sum(sizes[turn] for turn in in_window),
            num_recalled_tokens=sum(sizes[entry.turn] for entry in self.entries if entry.is_recalled),
            num_archived_tokens=sum(size for turn, size in enumerate(sizes) if turn not in in_window),
            num_kv_blocks=len(self.context.block_table),
            turns=tuple(
                TurnInfo(
                    index=turn.index,
                    at=turn.at,
                    num_tokens=sizes[turn.index],
                    state=state(turn.index),
                    text="\n".join(f"{message.role}: {message.content}" for message in turn.messages),
                    request_id=None if turn.reply is None else turn.reply.request_id,
                )
                for turn in self.turns
            ),
            triggers=self.triggers,
            num_recalls_switched=self.num_recalls_switched,
        )

    def check(self) -> None:
        """Raise AssertionError unless context, layout and flags agree."""
        context, layout_ids = self.context, self.layout_token_ids(self.entries)
        name = f"session {self.session_id}"
        if self.is_running:
            assert context.token_ids[: len(layout_ids)] == layout_ids, f"{name}: not its layout"
        else:
            assert context.token_ids == layout_ids, f"{name}: not its layout"
        assert context.num_computed <= len(context.token_ids), f"{name}: computed beyond its tokens"
        assert not (self.is_parked and context.block_table), f"{name}: parked with blocks"
        assert not (self.is_parked and context.num_computed), f"{name}: parked and computed"
        entries = [(entry.turn, entry.is_recalled) for entry in self.entries]
        assert len(set(entries)) == len(entries), f"{name}: a turn stands in the context twice"
        assert [turn.index for turn in self.turns] == list(range(len(self.turns))), f"{name}: turns"
        assert sum(len(self.token_ids_of(e.turn)) for e in self.entries if e.is_recalled) <= (
            self.record.recall_budget
        ), f"{name}: more recalled than its budget"

    def _in_range(self, asked: RecallRange | None) -> list[int]:
        if asked is None:
            return []
        return [turn.index for turn in self.turns if asked.start_s <= turn.at < asked.end_s]

    def archived_turns(self) -> list[int]:
        """Turns that have left the window, ascending."""
        in_window = {entry.turn for entry in self.entries if not entry.is_recalled}
        return [turn.index for turn in self.turns if turn.index not in in_window]
