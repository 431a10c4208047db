"""Puts a session's context together in the KV pool, and takes it out again.

An entry's KV comes from where it lies in the pool already, or from the tiers outside it. Because keys
are un-rotated, putting an entry elsewhere is a plain copy. From the first entry whose KV is not to be
had (or is wanted as text, or is dearer to read than to compute), everything after it is computed again:
text is the truth, KV a cache.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import prod
from typing import cast

import torch
from torch import Tensor

from dayshift.engine.api import RecallMode
from dayshift.engine.block_pool import BlockPool, Context
from dayshift.engine.sequence import LedgerCounts
from dayshift.engine.sessions.arrival import StoredArrival
from dayshift.engine.sessions.kv_tiers import KVTiers
from dayshift.engine.sessions.layout import CallPlan, Entry
from dayshift.engine.sessions.records import SYSTEM, LayoutRecord
from dayshift.engine.sessions.restore_cost import RestoreCost, SavedEntry
from dayshift.engine.sessions.session import Session
from dayshift.engine.sessions.stored_piece import StoredPiece, Tier

SYSTEM_ENTRY = Entry(SYSTEM)

# More and smaller groups of layers hide more of the copies, and cost more launches.
_MAX_LAYER_GROUPS = 4
_GROUP_BYTES = 32 << 20  # or more: what takes less than a millisecond is not worth hiding


class ContextBuilder:
    """Moves KV of sessions between the tiers and the pool.

    `cost` None: what can be read is read. `num_choices` counts what was decided by cost for parked
    sessions: "read", "compute", or "both" where the first turns were read and the others computed.
    `waits_by_layer` tells of a step with so many tokens whether it takes KV in groups of layers, as it comes;
    `step_tokens` how many tokens of prompts a step computes now.
    """

    def __init__(
        self,
        pool: BlockPool,
        tiers: KVTiers,
        cost: RestoreCost | None,
        waits_by_layer: Callable[[int], bool],
        step_tokens: Callable[[], int],
    ) -> None:
        self._pool = pool
        self._tiers = tiers
        self._cost = cost
        self._waits_by_layer = waits_by_layer
        self._step_tokens = step_tokens
        self.num_choices: Counter[str] = Counter()

    def with_cost(self, cost: RestoreCost | None) -> ContextBuilder:
        """One that decides by other measurements, and counts for itself."""
        return ContextBuilder(self._pool, self._tiers, cost, self._waits_by_layer, self._step_tokens)

    def num_kept(self, session: Session, entries: Sequence[Entry]) -> int:
        """How many tokens stay where they are in the pool when `entries` are laid out."""
        if session.is_parked:
            return 0
        after = (SYSTEM_ENTRY, *entries)
        num_same = _num_same((SYSTEM_ENTRY, *session.entries), after)
        num_tokens = sum(len(session.token_ids_of(entry.turn)) for entry in after[:num_same])
        return min(num_tokens, session.context.num_computed)

    def archived(self, session: Session, plan: CallPlan, mode: RecallMode, *, num_new: int) -> list[int]:
        """The turns whose KV `build` would read from archives now, in the order of the context. What it would
        read from host memory stays there."""
        _, moved = self._moved(session, plan, num_new)
        sources = [*self._sources(session, moved, self._spans_in_pool(session), plan, mode)]
        for entry, tier in sources:
            if tier is Tier.HOST:
                self._tiers.touch(session, entry.turn)
        return [entry.turn for entry, tier in sources if tier is Tier.ARCHIVE]

    def build(
        self, session: Session, plan: CallPlan, mode: RecallMode, *, num_new: int, num_extra: int
    ) -> LedgerCounts:
        """Lay out `plan.entries` in the pool, with blocks for `num_extra` tokens more.

        The caller has made room, and will compute `num_new` new tokens. Returns where the context's
        tokens came from.
        """
        started = time.monotonic()
        self._save(session, plan.archived)
        spans = self._spans_in_pool(session)
        kept, moved = self._moved(session, plan, num_new, counts_choice=True)

        # Read what is to be moved before anything is overwritten.
        pieces = self._pieces(session, moved, spans, plan, mode)

        # Everything that can fail has to come before the context changes.
        if plan.entries != session.entries:
            session.archive.append_layout(layout_record(session, plan.entries))

        context, counts = session.context, LedgerCounts()
        num_kept = sum(len(session.token_ids_of(entry.turn)) for entry in kept)
        is_kept_whole = context.num_computed >= num_kept
        counts.reused = context.num_computed = min(num_kept, context.num_computed)
        context.token_ids = session.layout_token_ids(plan.entries)
        self._pool.reserve(context, len(context.token_ids) + num_extra)
        if is_kept_whole:
            self._put(context, [piece for _, piece in pieces], num_new)
            session.read_turns |= {entry.turn for entry, piece in pieces if isinstance(piece, StoredPiece)}
            for entry, piece in pieces:
                self._count(counts, entry, piece, plan)
        self._count_uncomputed(session, (SYSTEM_ENTRY, *plan.entries), counts)
        session.entries = plan.entries
        session.is_parked = False
        wait_s = 0.0 if session.fetch is None else session.fetch.wait_s
        elapsed_ms = (wait_s + time.monotonic() - started) * 1e3
        if counts.restored:
            counts.restore_ms = elapsed_ms
        elif counts.recalled:
            counts.recall_ms = elapsed_ms
        return counts

    def park(self, session: Session) -> None:
        """Keep the KV that host memory lacks, and give the blocks back."""
        self._save(session, [SYSTEM, *(entry.turn for entry in session.entries)])
        self._pool.release(session.context)
        session.read_turns.clear()
        session.is_parked = True

    def _put(self, context: Context, pieces: Sequence[Tensor | StoredPiece], num_new: int) -> None:
        """Append KV to what is computed of a context; `num_new` tokens will be appended to its own."""
        num_uncomputed = len(context.token_ids) - context.num_computed - sum(map(_num_tokens, pieces))
        waits_by_layer = self._waits_by_layer(num_uncomputed + num_new)
        for is_stored, run in groupby(pieces, lambda piece: isinstance(piece, StoredPiece)):
            run = list(run)
            if is_stored:
                stored = cast("list[StoredPiece]", run)
                num_bytes = sum(piece.num_bytes for piece in stored)
                num_groups = min(_MAX_LAYER_GROUPS, num_bytes // _GROUP_BYTES) if waits_by_layer else 1
                arrival = StoredArrival(
                    self._pool, self._tiers.host, context, stored, num_groups=max(1, num_groups)
                )
                self._pool.expect(arrival)
            else:
                self._pool.write(context, context.num_computed, torch.cat(cast("list[Tensor]", run), dim=2))
            context.num_computed += sum(map(_num_tokens, run))

    def _save(self, session: Session, turns: Sequence[int]) -> None:
        """Keep KV that no tier has; or an archive alone, if it was computed again for being quicker than
        that. KV that was read is not kept anew: some codecs would take more from it each time."""
        spans = self._spans_in_pool(session)
        for turn in turns:
            self._tiers.touch(session, turn)  # what makes room takes pieces of other sessions
        for turn in turns:
            start, end = spans.get(turn, (0, 0))
            tier = self._tiers.tier_of(session, turn) if end > start else Tier.HOST
            if tier is None or (tier is Tier.ARCHIVE and turn not in session.read_turns):
                self._tiers.save(session, turn, self._pool.read(session.context, start, end))

    def _moved(
        self, session: Session, plan: CallPlan, num_new: int, *, counts_choice: bool = False
    ) -> tuple[Sequence[Entry], Sequence[Entry]]:
        """The entries that stay where they are in the pool, and those after them that may be put there;
        whatever comes then is computed."""
        after = (SYSTEM_ENTRY, *plan.entries)
        num_same = 0 if session.is_parked else _num_same((SYSTEM_ENTRY, *session.entries), after)
        num_read = self._num_to_read(session, after, plan, num_new, counts_choice)
        return after[:num_same], after[num_same:num_read]

    def _num_to_read(
        self, session: Session, entries: Sequence[Entry], plan: CallPlan, num_new: int, counts_choice: bool
    ) -> int:
        """How many of the entries, from the first, may be read; turns recalled as KV always are."""
        if self._cost is None or not session.is_parked or plan.recalled:
            return len(entries)
        saved: list[SavedEntry] = []
        for entry in entries:
            tier = self._tiers.tier_of(session, entry.turn)
            num_tokens = len(session.token_ids_of(entry.turn))
            if tier is None and num_tokens:
                break
            saved.append(SavedEntry(num_tokens, tier or Tier.HOST))
        if not any(entry.num_tokens for entry in saved):
            return len(entries)
        num_unsaved = sum(len(session.token_ids_of(entry.turn)) for entry in entries[len(saved) :])
        num_read = self._cost.num_to_read(
            saved,
            num_unsaved + num_new,
            step_tokens=self._step_tokens(),
            load=self._tiers.reader.load,
        )
        if counts_choice:
            choice = "compute" if num_read == 0 else "read" if num_read == len(saved) else "both"
            self.num_choices[choice] += 1
        return num_read

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
    ) -> list[tuple[Entry, Tensor | StoredPiece]]:
        """The KV of these entries, out of the pool or as it is stored, up to the first that has to be
        computed."""
        pieces: list[tuple[Entry, Tensor | StoredPiece]] = []
        for entry, tier in self._sources(session, entries, spans, plan, mode):
            if tier is None:
                pieces.append((entry, self._pool.read(session.context, *spans[entry.turn])))
            elif (piece := self._tiers.find(session, entry.turn)) is not None:
                pieces.append((entry, piece))
            else:
                break
        return pieces

    def _sources(
        self,
        session: Session,
        entries: Sequence[Entry],
        spans: dict[int, tuple[int, int]],
        plan: CallPlan,
        mode: RecallMode,
    ) -> Iterator[tuple[Entry, Tier | None]]:
        """The tier of each entry's KV, None for the pool, up to the first entry that has to be computed."""
        for entry in entries:
            is_text = mode is RecallMode.TEXT and entry.is_recalled
            if is_text and (entry.turn in plan.recalled or entry.turn not in spans):
                return
            tier = None if entry.turn in spans else self._tiers.tier_of(session, entry.turn)
            if tier is None and entry.turn not in spans:
                return
            yield entry, tier

    def _count(self, counts: LedgerCounts, entry: Entry, piece: Tensor | StoredPiece, plan: CallPlan) -> None:
        num_tokens = _num_tokens(piece)
        num_values = prod(piece.form.dims) if isinstance(piece, StoredPiece) else piece.numel()
        num_bytes = num_values * self._pool.dtype.itemsize
        if entry.is_recalled and entry.turn in plan.recalled:
            counts.recalled += num_tokens
            counts.recalled_bytes += num_bytes
        elif isinstance(piece, StoredPiece):
            counts.restored += num_tokens
            counts.restored_bytes += num_bytes
        else:
            counts.reused += num_tokens

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


def _num_tokens(piece: Tensor | StoredPiece) -> int:
    return piece.num_tokens if isinstance(piece, StoredPiece) else piece.shape[2]


def layout_record(session: Session, entries: Sequence[Entry]) -> LayoutRecord:
    """How the archive keeps a layout."""
    return LayoutRecord(
        num_turns=len(session.turns),
        window_turns=tuple(entry.turn for entry in entries if not entry.is_recalled),
        recalled_turns=tuple(entry.turn for entry in entries if entry.is_recalled),
        triggers=session.triggers,
    )
