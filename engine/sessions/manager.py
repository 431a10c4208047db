"""All sessions of an engine: opening, calling, parking under pressure, closing."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq

from dayshift.engine.api import (
    ContextLengthExceededError,
    EngineDrainingError,
    FinishReason,
    GenerateChunk,
    InvalidRequestError,
    Message,
    OnMatch,
    RecallMode,
    RecallPresent,
    SessionBusyError,
    SessionConfig,
    SessionExistsError,
    SessionInfo,
    SessionNotFoundError,
    StoreError,
    TurnRequest,
)
from dayshift.engine.block_pool import BlockPool, Context
from dayshift.engine.sequence import LedgerCounts, Sequence
from dayshift.engine.sessions.archive import MemoryArchive, SessionArchive
from dayshift.engine.sessions.closing import said_on_the_way
from dayshift.engine.sessions.context_builder import ContextBuilder, layout_record
from dayshift.engine.sessions.kv_tiers import KVTiers
from dayshift.engine.sessions.layout import CallPlan, Entry, plan_call, youngest_fitting
from dayshift.engine.sessions.opening import looked_into, new_record, past_turns, reopened, turn_token_ids
from dayshift.engine.sessions.recall_gate import RecallGate
from dayshift.engine.sessions.recall_search import RecallSearch
from dayshift.engine.sessions.records import SYSTEM, SessionRecord, TurnRecord
from dayshift.engine.sessions.replies import end_reply, note_turns, repeated_reply, reply_record
from dayshift.engine.sessions.restore_cost import RestoreCost
from dayshift.engine.sessions.session import Session
from dayshift.engine.sessions.similarity import TurnSimilarity
from dayshift.engine.sessions.store import SessionStore
from dayshift.engine.sessions.triggers import check_range, check_triggers
from dayshift.engine.tokenizer import Tokenizer


class SessionManager:
    """Owns the sessions. `store` None keeps their records in memory only.

    `is_draining`: sessions are given away, one by one, and none is opened any more.
    """

    def __init__(
        self,
        pool: BlockPool,
        tokenizer: Tokenizer,
        *,
        default_window: int,
        max_context: int,
        store: SessionStore | None,
        tiers: KVTiers,
        cost: RestoreCost | None,
        waits_by_layer: Callable[[int], bool],
        step_tokens: Callable[[], int],
        similarity: TurnSimilarity,
        recall_gate: RecallGate,
    ) -> None:
        self.builder = ContextBuilder(pool, tiers, cost, waits_by_layer, step_tokens)
        self._tiers = tiers
        self._search = RecallSearch(similarity, tiers)
        self.recall_gate = recall_gate
        self._pool = pool
        self._tokenizer = tokenizer
        self._default_window = default_window
        self._max_context = max_context
        self.store = store
        self._sessions: dict[str, Session] = {}
        self.is_draining = False

    # --- life of a session ---------------------------------------------------------------------

    def open(self, config: SessionConfig) -> SessionInfo:
        """Create a session. Raises InvalidRequestError, SessionExistsError, EngineDrainingError."""
        self.check_not_draining()
        if self._tokenizer.session_refusal is not None:
            raise InvalidRequestError(
                f"sessions are refused for this model: {self._tokenizer.session_refusal}"
            )
        session_id = config.session_id or uuid.uuid4().hex
        if session_id in self._sessions:
            raise SessionExistsError(f"session {session_id} exists already")
        record = new_record(
            session_id,
            config,
            self._tokenizer,
            default_window=self._default_window,
            max_context=self._max_context,
        )
        archive = self._new_archive(record, past_turns(config.history, self._tokenizer))
        session = Session(archive)
        session.entries = youngest_fitting(session.sizes(), session.limits, len(record.system_token_ids))
        session.context.token_ids = session.layout_token_ids(session.entries)
        archive.append_layout(layout_record(session, session.entries))
        self._sessions[session_id] = session
        return self._info(session)

    def get(self, session_id: str) -> Session:
        """The session, read from the store if it is not in memory.

        Raises SessionNotFoundError, SessionLockedError, EngineDrainingError.
        """
        session = self._sessions.get(session_id)
        if session is not None and session.archive.is_lost and session.is_idle:
            self._forget(session)
            session = None
        if session is None:
            if self.store is None:
                raise SessionNotFoundError(f"no session {session_id!r}")
            self.check_not_draining()
            try:
                opened = self.store.open(session_id)
            except SessionNotFoundError:  # without the folder, which is no client's business
                raise SessionNotFoundError(f"no session {session_id!r}") from None
            session = self._sessions[session_id] = reopened(opened, self._tokenizer)
        return session

    def info(self, session_id: str) -> SessionInfo:
        """A session and its turns. Raises as `get`."""
        return self._info(self.get(session_id))

    def infos(self) -> Iterator[SessionInfo]:
        """All sessions. Those that are not in memory are read and left to whoever opens them; the log is
        told of those that cannot be read, and the others are listed."""
        for session_id in self.list_ids():
            if (session := self._sessions.get(session_id)) is not None:
                yield self._info(session)
            elif self.store is not None:
                yield from map(self._info, looked_into(self.store, session_id, self._tokenizer))

    @property
    def num_open(self) -> int:
        """Sessions in memory: with a store, no other engine can open these."""
        return len(self._sessions)

    @property
    def num_sessions(self) -> int:
        """Sessions in memory and in the store."""
        return len(self.list_ids())

    @property
    def num_parked(self) -> int:
        """Sessions that hold no blocks until they are called: parked here, or only in the store."""
        return self.num_sessions - sum(not session.is_parked for session in self._sessions.values())

    def list_ids(self) -> list[str]:
        """Ids of all sessions, parked and stored ones included."""
        stored = [] if self.store is None else self.store.list_session_ids()
        return sorted({*self._sessions, *stored})

    def fork(self, session_id: str, new_id: str | None) -> SessionInfo:
        """A new session with the same turns and layout. KV is not copied: blocks are shared until one of
        the two writes to them, and what lies in the tiers is found there by both."""
        self.check_not_draining()
        source = self._idle(session_id)
        new_id = new_id or uuid.uuid4().hex
        if new_id in self._sessions:
            raise SessionExistsError(f"session {new_id} exists already")
        # Without its replies: those are of the source's calls.
        turns = [dataclasses.replace(turn, reply=None) for turn in source.turns]
        archive = self._new_archive(dataclasses.replace(source.record, session_id=new_id), turns)
        session = self._sessions[new_id] = Session(
            archive,
            entries=source.entries,
            context=self._pool.share(source.context),
            triggers=source.triggers,
            computed_turns=set(source.computed_turns),
            read_turns=set(source.read_turns),
            sources=((source.archive, len(source.turns)), *source.sources),
            is_parked=source.is_parked,
        )
        archive.append_layout(layout_record(session, session.entries))
        return self._info(session)

    def park(self, session_id: str) -> None:
        """Give the session's blocks back; what no tier has of its KV goes to host memory."""
        session = self._idle(session_id)
        self._tiers.end_fetch(session)
        if not session.is_parked:
            self.builder.park(session)

    def drain(self) -> None:
        """Open no session any more; `release_next` gives away those that are open.

        Raises InvalidRequestError without a store: nobody else could open them.
        """
        if self.store is None:
            raise InvalidRequestError("this engine keeps its sessions in memory only: they cannot be moved")
        self.is_draining = True

    def check_not_draining(self) -> None:
        """Raises EngineDrainingError."""
        if self.is_draining:
            raise EngineDrainingError("this engine is draining; another one takes its work")

    @property
    def can_release(self) -> bool:
        """An idle session is still to be given away."""
        return self.is_draining and any(session.is_idle for session in self._sessions.values())

    def release_next(self) -> None:
        """Park one idle session and close its file, so that another engine can open it."""
        session = next(session for session in self._sessions.values() if session.is_idle)
        if not session.is_parked:
            self.builder.park(session)
        self._tiers.flush(session)
        self._forget(session)

    def close(self, session_id: str) -> None:
        """Forget a session and delete its records."""
        session = self._idle(session_id)
        self._forget(session)
        if self.store is not None:
            self.store.delete(session_id)

    def set_triggers(self, session_id: str, triggers: tuple[OnMatch, ...]) -> None:
        """Replace the session's recall triggers."""
        check_triggers(triggers)
        session = self._idle(session_id)
        before, session.triggers = session.triggers, triggers
        try:
            session.archive.append_layout(layout_record(session, session.entries))
        except StoreError:
            session.triggers = before
            raise

    def prefetch(self, session_id: str) -> LedgerCounts:
        """Restore a parked session before it is called, if there is room without parking another; where
        archives have its KV, `take_up` does it once that is read."""
        session = self.get(session_id)
        if not session.is_idle or not session.is_parked or session.is_restoring:
            return LedgerCounts()
        counts, plan = LedgerCounts(), CallPlan(entries=session.entries)
        num_missing = self._pool.num_missing(session.context, len(session.context.token_ids))
        if num_missing <= self._pool.num_free:
            mode = self._recall_mode(plan, RecallMode.KV)
            if self._tiers.fetch(session, self.builder.archived(session, plan, mode, num_new=0)):
                return counts
            counts = self.builder.build(session, plan, mode, num_new=0, num_extra=0)
        self._tiers.end_fetch(session)
        return counts

    def take_up(self, *, waits: bool) -> int:
        """Take up what threads have read and written since; the tokens of sessions that are restored with it
        ahead of a call. `waits`: until something was read, or was given up."""
        if not self._tiers.take_up(waits=waits):
            return 0
        ahead = [
            s for s in self._sessions.values() if s.fetch is not None and s.is_idle and not s.is_restoring
        ]
        return sum(self.prefetch(session.session_id).restored for session in ahead)

    def shut_down(self) -> None:
        """Park every session, so that nothing but running calls is lost."""
        for session in said_on_the_way(list(self._sessions.values())):
            if session.is_idle and not session.is_parked:
                self.builder.park(session)
            if self.store is not None:
                self._tiers.flush(session)
                self._forget(session)
        self._tiers.close()

    # --- a call --------------------------------------------------------------------------------

    def recorded_reply(self, request: TurnRequest) -> GenerateChunk | None:
        """The reply of a turn that was taken already, in one chunk; None if it was not.

        Raises SessionNotFoundError, SessionLockedError, EngineDrainingError; InvalidRequestError if the
        request's id belongs to another turn of the session.
        """
        turn = self.get(request.session_id).turn_of_request(request.request_id)
        if turn is None or turn.reply is None:
            return None
        if (turn.at, turn.messages[:-1]) != (request.at, self._messages_of(request)):
            raise InvalidRequestError(
                f"request id {request.request_id} is that of turn {turn.index} of session "
                f"{request.session_id}, which was another; a new turn needs a new id"
            )
        return repeated_reply(turn, turn.reply)

    def begin(self, request: TurnRequest) -> tuple[Session, list[int]]:
        """Mark the session busy; the session and the token ids of its new turn.

        Raises SessionNotFoundError, SessionBusyError, SessionLockedError, InvalidRequestError.
        """
        session = self.get(request.session_id)
        if session.is_busy:
            raise SessionBusyError(f"session {request.session_id} has a call in flight; one at a time")
        if request.recall_mode is RecallMode.KV and (request.recall_range or session.triggers):
            self.recall_gate.check()
        check_range(request.recall_range, "recall_range")
        if bool(request.messages) == bool(request.token_ids):
            raise InvalidRequestError("a turn needs either messages or token ids")
        window = session.record.window
        token_ids = turn_token_ids(request, window, self._tokenizer)
        needed = len(session.record.system_token_ids) + self._num_extra(token_ids, request)
        if needed > window:
            raise ContextLengthExceededError(
                "the turn does not fit: system prompt, turn and max_tokens are "
                f"{needed} tokens, the window is {window}"
            )
        session.is_busy = True
        session.priority = request.priority
        session.retain_until = request.retain_until or 0.0
        return session, token_ids

    def plan(self, sequence: Sequence) -> CallPlan | None:
        """What admitting this turn would do to its session's layout; None: KV for it is read from archives
        now, and the session `is_restoring` until that is there."""
        session, request = _session_of(sequence), _turn_of(sequence)
        if self._tiers.fetch(session, self._search.unread_turns(session, sequence)):
            return None
        plan = plan_call(
            session.entries,
            session.sizes(),
            session.limits,
            num_system=len(session.record.system_token_ids),
            num_new=self._num_extra(sequence.new_token_ids, request),
            asked=self._search.asked_turns(session, sequence),
            repeat_present=request.recall_present is RecallPresent.REPEAT,
        )
        return None if self._fetch(sequence, plan) else plan

    def _fetch(self, sequence: Sequence, plan: CallPlan) -> bool:
        """Begin to read what a planned call needs of archives; whether it has to wait for that."""
        session, request = _session_of(sequence), _turn_of(sequence)
        mode = self._recall_mode(plan, request.recall_mode)
        num_new = len(sequence.new_token_ids)
        return self._tiers.fetch(session, self.builder.archived(session, plan, mode, num_new=num_new))

    def make_room(self, sequence: Sequence, plan: CallPlan) -> bool:
        """Park other sessions until the planned call fits; False if it cannot yet, or if its own KV had to
        leave host memory for theirs."""
        session = _session_of(sequence)
        num_tokens = len(session.layout_token_ids(plan.entries)) + self._num_extra(
            sequence.new_token_ids, _turn_of(sequence)
        )
        num_kept = self.builder.num_kept(session, plan.entries)
        has_room = self._park_others(
            lambda: self._pool.num_missing(session.context, num_tokens, num_kept), but=session
        )
        return has_room and not self._fetch(sequence, plan)

    def free_blocks(self, num_blocks: int) -> bool:
        """Park sessions until `num_blocks` are free; False if there are not enough to park yet."""
        return self._park_others(lambda: num_blocks)

    def _park_others(self, num_missing: Callable[[], int], but: Session | None = None) -> bool:
        """Park sessions until `num_missing` blocks are free, which may become fewer as blocks that are
        shared become one session's own. False if there are not enough to park."""
        if num_missing() <= self._pool.num_free:
            return True
        victims = [s for s in self._sessions.values() if s.can_park and s is not but]
        if self._pool.num_free + sum(len(s.context.block_table) for s in victims) < num_missing():
            return False
        now = time.time()
        for session in sorted(victims, key=lambda s: s.parking_order(now)):
            if num_missing() <= self._pool.num_free:
                break
            self.builder.park(session)
        return num_missing() <= self._pool.num_free

    def admit(self, sequence: Sequence, plan: CallPlan) -> None:
        """Lay out the session's context for the call and append the new turn's tokens."""
        session, request = _session_of(sequence), _turn_of(sequence)
        num_extra = self._num_extra(sequence.new_token_ids, request)
        mode = self._recall_mode(plan, request.recall_mode)
        if plan.recalled and mode is not request.recall_mode:
            session.num_recalls_switched += 1
            self.recall_gate.num_switched += 1
        counts = self.builder.build(
            session, plan, mode, num_new=len(sequence.new_token_ids), num_extra=num_extra
        )
        self._tiers.end_fetch(session)
        counts.computed += len(sequence.new_token_ids)
        session.context.token_ids += sequence.new_token_ids
        session.is_running = True
        sequence.counts = counts
        note_turns(sequence, plan)

    def commit(self, sequence: Sequence, text: str, reason: FinishReason) -> None:
        """Make the answered turn durable and part of the session.

        The context is completed with what the template puts after a reply; `close_turn` follows
        once the KV of these last tokens is computed.
        """
        session, request = _session_of(sequence), _turn_of(sequence)
        context, num_layout = session.context, len(session.layout_token_ids(session.entries))
        if request.messages:
            end_reply(self._tokenizer, context.token_ids, sequence.output_ids)
        turn = TurnRecord(
            index=len(session.turns),
            at=request.at,
            messages=(*self._messages_of(request), Message("assistant", text)),
            token_ids=tuple(context.token_ids[num_layout:]),
            reply=reply_record(sequence, reason),
        )
        session.archive.append_turn(turn)
        session.computed_turns |= {SYSTEM, turn.index, *(entry.turn for entry in session.entries)}
        session.entries = (*session.entries, Entry(turn.index))
        session.is_busy = session.is_running = False
        session.is_closing = True

    def close_turn(self, session: Session) -> None:
        """The last tokens of the committed turn are computed: the session is idle again."""
        self._pool.trim(session.context)
        session.is_closing = False
        session.last_used_at = time.monotonic()

    def roll_back(self, sequence: Sequence) -> None:
        """Forget a turn that was cancelled or failed: back to the last committed one."""
        session = _session_of(sequence)
        self._tiers.end_fetch(session)
        context = session.context
        context.token_ids = session.layout_token_ids(session.entries)
        context.num_computed = min(context.num_computed, len(context.token_ids))
        self._pool.trim(context)
        session.is_busy = session.is_running = False
        session.last_used_at = time.monotonic()

    def contexts(self) -> Iterator[Context]:
        """The contexts of all sessions in memory."""
        return (session.context for session in self._sessions.values())

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless each session agrees with itself and with the calls in flight."""
        self._tiers.reader.check(s.fetch for s in self._sessions.values() if s.fetch is not None)
        called = [sequence.session for sequence in sequences if sequence.session is not None]
        for session_id, session in self._sessions.items():
            session.check()
            assert called.count(session) == session.is_busy, f"session {session_id}: who calls it?"
            for archive, _ in session.sources:
                source = self._sessions.get(archive.session.session_id)
                assert source is not None, f"session {session_id}: its source is gone"
                assert source.archive is archive, f"session {session_id}: its source is another now"

    # --- parts ---------------------------------------------------------------------------------

    def _info(self, session: Session) -> SessionInfo:
        return dataclasses.replace(session.info(), kv_recall=self.recall_gate.state)

    def _recall_mode(self, plan: CallPlan, asked: RecallMode) -> RecallMode:
        """How the turns of a call are recalled; the model is measured only if there are any."""
        is_any = any(entry.is_recalled for entry in plan.entries)
        return self.recall_gate.mode_for(asked) if is_any else asked

    def _new_archive(self, record: SessionRecord, turns: Seq[TurnRecord]) -> SessionArchive:
        return MemoryArchive(record, turns) if self.store is None else self.store.create(record, turns)

    def _forget(self, session: Session) -> None:
        """Let go of a session, its blocks and its archive.

        Sessions that were forked from it get what they lack of its KV.
        """
        self._tiers.end_fetch(session)
        for other in self._sessions.values():
            if any(archive is session.archive for archive, _ in other.sources):
                self._tiers.end_fetch(other)  # it may read this archive; its call will ask again
                self._tiers.flush(other)
                other.sources = tuple(pair for pair in other.sources if pair[0] is not session.archive)
        self._pool.release(session.context)
        self._tiers.forget(session.session_id)
        session.archive.close()
        del self._sessions[session.session_id]

    def _idle(self, session_id: str) -> Session:
        session = self.get(session_id)
        if not session.is_idle:
            raise SessionBusyError(f"session {session_id} has a call in flight")
        return session

    def _messages_of(self, request: TurnRequest) -> tuple[Message, ...]:
        """A turn's messages as they are recorded, whichever way it was given."""
        return request.messages or (Message("user", self._tokenizer.decode(request.token_ids)),)

    def _num_extra(self, new_token_ids: Seq[int], request: TurnRequest) -> int:
        """The most tokens a turn can add: prompt, reply, and what the template puts after the reply."""
        return len(new_token_ids) + request.sampling.max_tokens + len(self._tokenizer.reply_end_token_ids)


def _session_of(sequence: Sequence) -> Session:
    assert sequence.session is not None
    return sequence.session


def _turn_of(sequence: Sequence) -> TurnRequest:
    assert isinstance(sequence.request, TurnRequest)
    return sequence.request
