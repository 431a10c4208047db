"""Puts a session's context together in the KV pool, and takes it out again.

An entry's KV comes from where it lies in the pool already, or from the archive. Because keys are
un-rotated, putting an entry elsewhere is a plain copy. From the first entry whose KV is not to be had
(or is wanted as text), everything after it is computed again: text is the truth, KV a cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from torch import Tensor

from dayshift.engine.api import RecallMode
from dayshift.engine.block_pool import BlockPool
from dayshift.engine.sequence import LedgerCounts
from dayshift.engine.sessions import codecs
from dayshift.engine.sessions.archive import KVUnavailableError
from dayshift.engine.sessions.layout import CallPlan, Entry
from dayshift.engine.sessions.records import SYSTEM, LayoutRecord
from dayshift.engine.sessions.session import Session
from dayshift.engine.sessions.session_file import StoreFullError

logger = logging.getLogger(__name__)

SYSTEM_ENTRY = Entry(SYSTEM)


class ContextBuilder:
    """Moves KV between a session's archive and the pool, written there with the codec `kv_codec`.

    `num_refused_pieces` counts KV pieces that were there and could not be used, or not be written.
    """

    def __init__(self, pool: BlockPool, kv_codec: str) -> None:
        self._pool = pool
        self._kv_codec = kv_codec
        self.num_refused_pieces = 0

    def build(self, session: Session, plan: CallPlan, mode: RecallMode, num_extra: int) -> LedgerCounts:
        """Lay out `plan.entries` in the pool, with blocks for `num_extra` tokens more.

        The caller has made room. Returns where the context's tokens came from.
        """
        started = time.monotonic()
        self._archive(session, plan.archived)
        spans = self._spans_in_pool(session)
        before = (SYSTEM_ENTRY, *session.entries)
        after = (SYSTEM_ENTRY, *plan.entries)
        num_same = _num_same(before, after) if not session.is_parked else 0

        # Read what is to be moved before anything is overwritten.
        pieces = self._pieces(session, after[num_same:], spans, plan, mode)

        # Everything that can fail has to come before the context changes.
        if plan.entries != session.entries:
            session.archive.append_layout(_layout_record(session, plan.entries))

        context, counts = session.context, LedgerCounts()
        num_kept = sum(len(session.token_ids_of(entry.turn)) for entry in after[:num_same])
        is_kept_whole = context.num_computed >= num_kept
        counts.reused = context.num_computed = min(num_kept, context.num_computed)
        context.token_ids = session.layout_token_ids(plan.entries)
        self._pool.reserve(context, len(context.token_ids) + num_extra)
        for entry, piece, is_archived in pieces if is_kept_whole else ():
            self._pool.write(context, context.num_computed, piece)
            context.num_computed += piece.shape[2]
            _count(counts, entry, piece, is_archived, plan)
        self._count_uncomputed(session, after, counts)
        session.entries = plan.entries
        session.is_parked = False
        elapsed_ms = (time.monotonic() - started) * 1e3
        if counts.restored:
            counts.restore_ms = elapsed_ms
        elif counts.recalled:
            counts.recall_ms = elapsed_ms
        return counts

    def save(self, session: Session) -> None:
        """Write the layout and every KV piece that the archive lacks, so that the blocks may go."""
        self._archive(session, [SYSTEM, *(entry.turn for entry in session.entries)])
        session.archive.append_layout(_layout_record(session, session.entries))

    def park(self, session: Session) -> None:
        """`save`, and give the blocks back."""
        self.save(session)
        self._pool.release(session.context)
        session.is_parked = True

    def _archive(self, session: Session, turns: Sequence[int]) -> None:
        spans = self._spans_in_pool(session)
        for turn in turns:
            span = spans.get(turn)
            if span is not None and span[1] > span[0] and not session.archive.has_kv(turn):
                self._archive_piece(session, turn, self._pool.read(session.context, *span))

    def _archive_piece(self, session: Session, turn: int, kv: Tensor) -> None:
        try:
            session.archive.append_kv(turn, codecs.encode(self._kv_codec, kv))
        except (codecs.KVNotEncodableError, StoreFullError) as error:
            self.num_refused_pieces += 1
            logger.warning("session %s: KV of turn %d is not archived: %s", session.session_id, turn, error)

    def _spans_in_pool(self, session: Session) -> dict[int, tuple[int, int]]:
        """Turn -> [start, end) of its computed tokens; whole turns only."""
        spans: dict[int, tuple[int, int]] = {}
        position = 0
        for entry in (SYSTEM_ENTRY, *session.entries):
            end = position + len(session.token_ids_of(entry.turn))
            if end > session.context.num_computed:
                break
            spans.setdefault(entry.turn, (position, end))
            position = end
        return spans

    def _pieces(
        self,
        session: Session,
        entries: Sequence[Entry],
        spans: dict[int, tuple[int, int]],
        plan: CallPlan,
        mode: RecallMode,
    ) -> list[tuple[Entry, Tensor, bool]]:
        """The KV of these entries, up to the first that has to be computed: (entry, KV, is_archived)."""
        pieces: list[tuple[Entry, Tensor, bool]] = []
        for entry in entries:
            if mode is RecallMode.TEXT and entry.is_recalled and entry.turn in plan.recalled:
                break
            if entry.turn in spans:
                pieces.append((entry, self._pool.read(session.context, *spans[entry.turn]), False))
            elif (piece := self._read_archived(session, entry.turn)) is not None:
                pieces.append((entry, piece, True))
            else:
                break
        return pieces

    def _read_archived(self, session: Session, turn: int) -> Tensor | None:
        if not session.archive.has_kv(turn):
            return None
        try:
            piece = session.archive.read_kv(turn)
            num_tokens = len(session.token_ids_of(turn))
            if piece.num_tokens != num_tokens:
                raise KVUnavailableError(f"it has {piece.num_tokens} tokens, the turn has {num_tokens}")
            return codecs.decode(piece, dtype=self._pool.dtype, device=self._pool.device)
        except KVUnavailableError as error:
            self.num_refused_pieces += 1
            logger.warning("session %s: KV of turn %d is computed again: %s", session.session_id, turn, error)
            return None

    def _count_uncomputed(self, session: Session, entries: Sequence[Entry], counts: LedgerCounts) -> None:
        position = 0
        for entry in entries:
            size = len(session.token_ids_of(entry.turn))
            missing = max(0, position + size - max(session.context.num_computed, position))
            if entry.turn in session.computed_turns:
                counts.recomputed += missing
            else:
                counts.computed += missing
            position += size


def _num_same(before: Sequence[Entry], after: Sequence[Entry]) -> int:
    """How many entries at the start are the same: they stay where they are."""
    pairs = zip(before, after, strict=False)
    return next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(before), len(after)))


def _count(counts: LedgerCounts, entry: Entry, piece: Tensor, is_archived: bool, plan: CallPlan) -> None:
    num_tokens, num_bytes = piece.shape[2], piece.numel() * piece.element_size()
    if entry.is_recalled and entry.turn in plan.recalled:
        counts.recalled += num_tokens
        counts.recalled_bytes += num_bytes
    elif is_archived:
        counts.restored += num_tokens
        counts.restored_bytes += num_bytes
    else:
        counts.reused += num_tokens


def _layout_record(session: Session, entries: Sequence[Entry]) -> LayoutRecord:
    return LayoutRecord(
        window_turns=tuple(entry.turn for entry in entries if not entry.is_recalled),
        recalled_turns=tuple(entry.turn for entry in entries if entry.is_recalled),
        triggers=session.triggers,
    )
