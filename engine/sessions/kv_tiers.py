"""Where the KV of a session's turns is kept outside the GPU: host memory first, then its archive.

What a call needs of archives is read into host memory by threads (`kv_reader`), before the call is admitted.

A piece is written to host memory, by the codec of KV at rest. When that is full, the pieces used longest
ago go to their session's archive (its file), once: one that the archive has already is dropped. Where
archives are files, a thread writes the oldest pieces before that (`write_behind`). When it cannot keep up,
steps do not wait for a disk that nobody would read from: a turn of a window that is computed again in less
time than it is read back is dropped. A turn that has left its window, or is about to, is kept, to be
recalled. A piece that an archive cannot take is lost: text is the truth, KV a cache.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor

from dayshift.engine.api import EngineError
from dayshift.engine.backend import Backend
from dayshift.engine.block_pool import BlockPool
from dayshift.engine.config import EngineConfig
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.sessions import codecs
from dayshift.engine.sessions.archive import KVUnavailableError, SessionArchive
from dayshift.engine.sessions.host_pool import HostPool, PieceKey
from dayshift.engine.sessions.kv_reader import NUM_READERS, ArchivedPiece, Fetch, KVReader
from dayshift.engine.sessions.layout import Entry, leaving_turns
from dayshift.engine.sessions.record_format import KVFormat
from dayshift.engine.sessions.records import SYSTEM, KVPiece
from dayshift.engine.sessions.restore_cost import RestoreCost
from dayshift.engine.sessions.session import Session
from dayshift.engine.sessions.stored_piece import StoredPiece, Tier
from dayshift.engine.sessions.write_behind import NUM_LOOKED_AT, WriteBehind

logger = logging.getLogger(__name__)


_CPU_HOST_BYTES = 1 << 28
_CUDA_HOST_BYTES = 8 << 30
_MAX_FETCHED_BYTES = 1 << 30  # of KV that was read for calls, beside the host tier


class KVTiers:
    """Keeps and finds KV pieces.

    `num_refused_pieces` were there and could not be used, or could not be encoded · `num_lost_pieces`
    could not be written to an archive · `num_dropped_pieces` were not worth a write · `num_loaded_tokens` by
    tier. `cost`, once it is measured, says what is worth a write; None: everything.
    """

    def __init__(
        self, pool: BlockPool, host: HostPool, codec: str, write_behind: WriteBehind | None = None
    ) -> None:
        self.host = host
        self.reader = KVReader(pool.device, pool.dtype, max_bytes=_MAX_FETCHED_BYTES)
        self.write_behind = write_behind
        self.codec = codec
        self._pool = pool
        self._sessions: dict[str, Session] = {}  # those with pieces in host memory
        self.cost: RestoreCost | None = None
        self._worthless_windows: dict[str, tuple[tuple[Entry, ...], frozenset[int]]] = {}
        self.num_refused_pieces = 0
        self.num_lost_pieces = 0
        self.num_dropped_pieces = 0
        self.num_loaded_tokens: Counter[Tier] = Counter()

    def tier_of(self, session: Session, turn: int) -> Tier | None:
        """The nearest place of a turn's KV; None if it is nowhere. What was fetched is in host memory."""
        if turn in session.fetched or self._host_key(session, turn) is not None:
            return Tier.HOST
        has_it = any(archive.has_kv(turn) for archive in session.archives_of(turn))
        return Tier.ARCHIVE if has_it else None

    def touch(self, session: Session, turn: int) -> None:
        """A turn's KV is about to be used: what makes room in host memory takes other pieces."""
        if (key := self._host_key(session, turn)) is not None:
            self.host.touch(key)

    def save(self, session: Session, turn: int, kv: Tensor) -> None:
        """Keep a turn's KV, a copy from the pool that host memory lacks: there, or where it is too large for
        that, in the archive."""
        encoded = codecs.encode_payload(self.codec, kv)
        num_blocks = self.host.num_blocks_for(encoded.payload.numel())
        if num_blocks > self.host.num_blocks:
            if self.tier_of(session, turn) is Tier.ARCHIVE:
                return
            try:
                self._append(session.archive, turn, encoded.to_host())
            except codecs.KVNotEncodableError as error:
                self._refuse(session.session_id, turn, error)
            return
        while self.host.num_free < num_blocks:
            self._evict(max(1, self.host.num_pieces // NUM_LOOKED_AT))
        self._sessions[session.session_id] = session
        self.host.put((session.session_id, turn), encoded)
        if self.write_behind is not None:
            self.write_behind.start_writes(self._archive_of, self._worth_writing())

    def find(self, session: Session, turn: int) -> StoredPiece | None:
        """A turn's KV as the nearest tier keeps it, checked; None if it has to be computed again.

        It is there until something is saved or forgotten.
        """
        if (fetched := session.fetched.get(turn)) is not None:
            self.num_loaded_tokens[Tier.ARCHIVE] += fetched.num_tokens
            return fetched
        key = self._host_key(session, turn)
        try:
            if key is not None:
                form, parts = self.host.get(key)
            elif (piece := self._read_archived(session, turn)) is not None:
                form, parts = piece.format, [torch.from_numpy(piece.data)]
            else:
                return None
            codecs.check_payload(form, sum(part.numel() for part in parts))
        except KVUnavailableError as error:
            self._compute_again(session.archive, turn, error)
            return None
        self.num_loaded_tokens[Tier.ARCHIVE if key is None else Tier.HOST] += form.num_tokens
        return StoredPiece(form, parts)

    def load(self, session: Session, turn: int) -> Tensor | None:
        """A turn's KV on the device, from the nearest tier; None if it has to be computed again."""
        piece = self.find(session, turn)
        if piece is None:
            return None
        (payload,) = self.host.deliver([piece.parts]).wait()
        return codecs.decode_payload(piece.form, payload, dtype=self._pool.dtype)

    def fetch(self, session: Session, turns: Iterable[int]) -> bool:
        """Begin to read the KV of turns that only archives have; whether there is anything to wait for."""
        pieces: list[ArchivedPiece] = []
        for turn in turns:
            archive = next(archive for archive in session.archives_of(turn) if archive.has_kv(turn))
            read = archive.open_kv(turn)
            try:
                self._check_form(session, turn, read.form)
            except KVUnavailableError as error:
                archive.refuse_kv(read)
                self._compute_again(archive, turn, error)
                break
            pieces.append(ArchivedPiece(archive, read))
        if pieces:
            session.fetch = session.fetch or Fetch()
            self.reader.ask(session.fetch, pieces)
        return bool(pieces)

    def take_up(self, *, waits: bool) -> bool:
        """Take up what threads have done since, between two steps; whether any read has ended. `waits`: until
        one has."""
        if self.write_behind is not None:
            self.write_behind.go_on(self._archive_of, self._worth_writing())
        if not waits and not self.reader.has_finished:
            return False
        for piece, error in self.reader.take(waits=waits):
            piece.archive.refuse_kv(piece.read)
            self._compute_again(piece.archive, piece.read.turn_index, error)
        return True

    def end_fetch(self, session: Session) -> None:
        """Let go of what was read for a session's call, or is read."""
        if session.fetch is not None:
            self.reader.drop(session.fetch)
            session.fetch = None

    def flush(self, session: Session) -> None:
        """Write to the session's own archive what it lacks."""
        for turn in (SYSTEM, *range(len(session.turns))):
            self._wait_for_write((session.session_id, turn))
            if session.archive.has_kv(turn):
                continue
            if (key := self._host_key(session, turn)) is not None:
                self._append(session.archive, turn, self.host.read(key))
                continue
            try:
                piece = self._read_archived(session, turn)
            except KVUnavailableError:  # damaged in the archive of the session that this one forked from
                self.num_refused_pieces += 1
                continue
            if piece is not None:
                self._append(session.archive, turn, piece)

    def forget(self, session_id: str) -> None:
        """Drop a session's pieces from host memory."""
        for key in self.host.keys_of(session_id):
            self._wait_for_write(key)
            self.host.drop(key)
        self._sessions.pop(session_id, None)
        self._worthless_windows.pop(session_id, None)

    def close(self) -> None:
        """Finish what is being written, give up what is read; nothing is kept any more after this."""
        self.reader.close()
        if self.write_behind is not None:
            self.write_behind.close()

    def _evict(self, num_pieces: int) -> None:
        """Let so many pieces leave host memory that their archives have; where nearly none are, those that
        are not worth a write; otherwise the oldest, which is written."""
        # Of a small tier, the older half: what was just used stays.
        old = self._oldest(min(NUM_LOOKED_AT, max(1, self.host.num_pieces // 2)))
        written = (key for key in old if self._archive_of(key).has_kv(key[1]))
        if not (leaving := list(islice(written, num_pieces))):
            leaving = list(islice(self._worthless(old), num_pieces))
            self.num_dropped_pieces += len(leaving)
        if not leaving:
            oldest = old[0]
            if not self._is_in_host(oldest):  # any more
                return
            self._wait_for_write(oldest)
            archive, turn = self._archive_of(oldest), oldest[1]
            if not archive.has_kv(turn):
                self._append(archive, turn, self.host.read(oldest))
            leaving = [oldest]
        for key in leaving:
            self._wait_for_write(key)
            self.host.drop(key)

    def _oldest(self, num_pieces: int) -> list[PieceKey]:
        """One to so many pieces, oldest use first. Those of sessions whose calls wait or run, which need
        them, or that are to be retained, are among them only if there are no others; they count as used
        now, so that whoever looks next does not meet them all again."""
        now = time.time()
        free: list[PieceKey] = []
        needed: list[PieceKey] = []
        for key in self.host:
            session = self._sessions[key[0]]
            (needed if session.is_busy or session.retain_until > now else free).append(key)
            if len(free) == num_pieces or (free and len(free) + len(needed) >= NUM_LOOKED_AT):
                break
        for key in needed:
            self.host.touch(key)
        return free or needed[:num_pieces]

    def _worth_writing(self) -> Iterator[PieceKey]:
        """Of the pieces that leave next, those that a call may read back from an archive."""
        old = self._oldest(NUM_LOOKED_AT)
        worthless = set(self._worthless(old))
        yield from (key for key in old if key not in worthless)

    def _worthless(self, keys: Iterable[PieceKey]) -> Iterator[PieceKey]:
        """Those that are not being written, and would be computed again were they in their archives."""
        turns_of: dict[str, frozenset[int]] = {}
        for session_id, turn in keys:
            if session_id not in turns_of:
                turns_of[session_id] = self._worthless_turns(self._sessions[session_id])
            if turn in turns_of[session_id]:
                key = (session_id, turn)
                if self.write_behind is None or not self.write_behind.is_writing(key):
                    yield key

    def _worthless_turns(self, session: Session) -> frozenset[int]:
        """Those of its window, but for turns that leave it when one more comes: they are to be recalled."""
        if self.cost is None:
            return frozenset()
        entries, turns = self._worthless_windows.get(session.session_id, (None, frozenset[int]()))
        if entries is not session.entries:  # which are not changed, but replaced
            turns = _dropped_turns(session, self.cost)
            self._worthless_windows[session.session_id] = session.entries, turns
        return turns

    def _archive_of(self, key: PieceKey) -> SessionArchive:
        return self._sessions[key[0]].archive

    def _is_in_host(self, key: PieceKey) -> bool:
        """Whether a piece is there and good; one that its codec could not hold is dropped."""
        if key not in self.host or self.host.is_sound(key):
            return key in self.host
        self.host.drop(key)
        self._refuse(*key, codecs.not_encodable(self.codec))
        return False

    def _compute_again(self, archive: SessionArchive, turn: int, error: KVUnavailableError) -> None:
        self.num_refused_pieces += 1
        session_id = archive.session.session_id
        logger.warning("session %s: KV of turn %d is computed again: %s", session_id, turn, error)

    def _refuse(self, session_id: str, turn: int, error: codecs.KVNotEncodableError) -> None:
        self.num_refused_pieces += 1
        logger.warning("session %s: KV of turn %d is not kept: %s", session_id, turn, error)

    def _wait_for_write(self, key: PieceKey) -> None:
        if self.write_behind is not None:
            self.write_behind.wait(key)

    def _append(self, archive: SessionArchive, turn: int, piece: KVPiece) -> None:
        try:
            archive.append_kv(turn, piece)
        except EngineError as error:
            self.num_lost_pieces += 1
            logger.warning("session %s: KV of turn %d is lost: %s", archive.session.session_id, turn, error)

    def _host_key(self, session: Session, turn: int) -> PieceKey | None:
        keys = ((archive.session.session_id, turn) for archive in session.archives_of(turn))
        return next((key for key in keys if self._is_in_host(key)), None)

    def _read_archived(self, session: Session, turn: int) -> KVPiece | None:
        """None: no archive has it. Raises KVUnavailableError: it is damaged."""
        archive = next((archive for archive in session.archives_of(turn) if archive.has_kv(turn)), None)
        if archive is None:
            return None
        piece = archive.read_kv(turn)
        self._check_form(session, turn, piece.format)
        return piece

    def _check_form(self, session: Session, turn: int, form: KVFormat) -> None:
        """Raise KVUnavailableError for KV that is not of this turn's length or of the pool's shape."""
        config, num_tokens = self._pool.config, len(session.token_ids_of(turn))
        expected = (2, config.num_layers, num_tokens, self._pool.num_kv_heads, config.head_dim)
        if form.dims != expected:
            raise KVUnavailableError(f"the KV has the shape {form.dims}, the turn's is {expected}")


def _dropped_turns(session: Session, cost: RestoreCost) -> frozenset[int]:
    turns = [entry.turn for entry in session.entries if not entry.is_recalled]
    sizes = {turn: len(session.token_ids_of(turn)) for turn in (SYSTEM, *turns)}
    if cost.is_sooner_read([*sizes.values()], num_readers=NUM_READERS):
        return frozenset()
    leaving = leaving_turns(
        turns, sizes, session.limits, num_system=sizes[SYSTEM], num_new=max(sizes.values())
    )
    return frozenset((SYSTEM, *turns[len(leaving) :]))


def open_tiers(config: EngineConfig, backend: Backend) -> KVTiers:
    """The tiers as an engine is configured, host memory allocated; none for a backend without sessions."""
    device = backend.pool.device
    num_bytes = config.host_kv_bytes
    if num_bytes is None:
        num_bytes = _CUDA_HOST_BYTES if device.type == "cuda" else _CPU_HOST_BYTES
    has_sessions = isinstance(backend.runner, ModelRunner)
    host = HostPool(
        num_bytes=num_bytes if has_sessions else 0,
        block_bytes=backend.model_config.kv_bytes_per_token(backend.dtype.itemsize) * config.block_size,
        device=device,
    )
    return KVTiers(
        backend.pool,
        host,
        backend.pool.exact_codec if config.kv_at_rest == "exact" else config.kv_at_rest,
        None if config.store_dir is None else WriteBehind(host),
    )
