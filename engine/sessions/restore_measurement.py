"""Measures, when an engine starts, what `RestoreCost` decides by."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

from dayshift.engine.api import StoreFullError
from dayshift.engine.block_pool import BlockPool, Chunk, Context
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.sessions import codecs
from dayshift.engine.sessions.archive import MemoryArchive, SessionArchive
from dayshift.engine.sessions.arrival import StoredArrival
from dayshift.engine.sessions.host_pool import HostPool
from dayshift.engine.sessions.kv_tiers import KVTiers
from dayshift.engine.sessions.leftovers import MEASUREMENT_PREFIX
from dayshift.engine.sessions.records import SessionRecord
from dayshift.engine.sessions.restore_cost import PrefillTime, ReadTime, RestoreCost
from dayshift.engine.sessions.session_file import FULL
from dayshift.engine.sessions.store import SessionStore
from dayshift.engine.sessions.stored_piece import StoredPiece, Tier

logger = logging.getLogger(__name__)

_PREFILL_TOKENS = (16, 128, 512, 2048, 8192)
_READ_TOKENS = (16, 128)  # of a piece
_NUM_PIECES = 16  # that are read from host memory together: one by itself takes longer
_NUM_TRIES = 2  # the fastest counts: what disturbs a measurement only ever makes it longer
_LONG_S = 0.2  # a step that takes longer is the last that is tried

_RECORD = SessionRecord(
    session_id="measurement",
    system=None,
    system_token_ids=(),
    window=1,
    high_water=1.0,
    low_water=1.0,
    recall_budget=0,
)


def measure_restore_cost(
    runner: ModelRunner, tiers: KVTiers, store: SessionStore | None, *, max_context: int, max_step_tokens: int
) -> RestoreCost:
    """Time steps of the model, and reads from both tiers, with contexts that are forgotten again."""
    reads = {Tier.ARCHIVE: _time_archive(runner.pool, tiers, store, max_context)}
    # Where host memory is too small for the measurement, hardly anything will ever be in it.
    reads[Tier.HOST] = _time_host(runner.pool, tiers, max_context) or reads[Tier.ARCHIVE]
    return RestoreCost(reads, _time_prefill(runner, min(max_context, max_step_tokens)))


def _time_prefill(runner: ModelRunner, room: int) -> PrefillTime:
    pool = runner.pool
    points: list[tuple[int, float]] = []
    # Different tokens: equal ones take one path through a mixture's experts, and a GPU less power.
    token_ids = Random(0).choices(range(runner.model.config.vocab_size), k=min(room, max(_PREFILL_TOKENS)))
    for num_tokens in sorted({min(size, room) for size in _PREFILL_TOKENS}):
        context = Context(token_ids[:num_tokens])
        pool.reserve(context, num_tokens)

        def step(context: Context = context, num_tokens: int = num_tokens) -> None:
            context.num_computed = 0
            runner.run([Chunk(context=context, num_tokens=num_tokens, needs_sampling=True)])

        seconds = _fastest(step, pool)
        points.append((num_tokens, max(seconds, points[-1][1] if points else 0.0)))
        pool.release(context)
        if points[-1][1] > _LONG_S:  # what is larger would hold up the start
            break
    return PrefillTime(tuple(points))


def _time_host(pool: BlockPool, tiers: KVTiers, room: int) -> ReadTime | None:
    host = tiers.host
    largest = codecs.encode_payload(tiers.codec, _zeros(pool, min(room, max(_READ_TOKENS))))
    num_pieces = min(_NUM_PIECES, room // max(_READ_TOKENS) or 1)
    num_pieces = min(num_pieces, host.num_blocks // host.num_blocks_for(largest.payload.numel()))
    if num_pieces == 0:
        return None
    keys = [("measurement", index) for index in range(num_pieces)]

    def forget() -> None:
        for key in keys:
            if key in host:
                host.drop(key)

    def prepare(num_tokens: int) -> Callable[[], list[StoredPiece]]:
        forget()
        for key in keys:
            host.put(key, codecs.encode_payload(tiers.codec, _zeros(pool, num_tokens)))
        return lambda: [StoredPiece(*host.get(key)) for key in keys]

    time = _time_reads(pool, host, room, prepare)
    forget()
    return time


def _time_archive(pool: BlockPool, tiers: KVTiers, store: SessionStore | None, room: int) -> ReadTime:
    """Reads of a file come from the disk, not from the system's cache, as after a long park."""
    if store is not None:
        try:
            with (
                tempfile.TemporaryDirectory(dir=store.root, prefix=MEASUREMENT_PREFIX) as folder,
                SessionStore(Path(folder), store.identity).create(_RECORD) as file,
            ):
                return _time_archive_reads(pool, tiers, file, room, next(Path(folder).iterdir()))
        except (StoreFullError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in FULL:
                raise
            # What it holds can be read all the same; how slow reads are is learnt from the first ones.
            logger.warning("reads of the store are not measured, because it is full: %s", error)
    return _time_archive_reads(pool, tiers, MemoryArchive(_RECORD), room, None)


def _time_archive_reads(
    pool: BlockPool, tiers: KVTiers, archive: SessionArchive, room: int, path: Path | None
) -> ReadTime:
    def prepare(num_tokens: int) -> Callable[[], list[StoredPiece]]:
        archive.append_kv(0, codecs.encode(tiers.codec, _zeros(pool, num_tokens)))

        def read() -> list[StoredPiece]:
            if path is not None:
                _drop_from_cache(path)
            piece = archive.read_kv(0)
            return [StoredPiece(piece.format, [torch.from_numpy(piece.data)])]

        return read

    return _time_reads(pool, tiers.host, room, prepare)


def _time_reads(
    pool: BlockPool, host: HostPool, room: int, prepare: Callable[[int], Callable[[], list[StoredPiece]]]
) -> ReadTime:
    """Time reads of small and large pieces, one or more together, written into the pool as a restore does
    it."""
    times: list[float] = []
    sizes = [min(size, room) for size in _READ_TOKENS]
    for num_tokens in sizes:
        read = prepare(num_tokens)
        num_pieces = len(read())
        context = Context([1] * (num_tokens * num_pieces))
        pool.reserve(context, len(context.token_ids))

        def restore(read: Callable[[], list[StoredPiece]] = read, context: Context = context) -> None:
            pool.expect(StoredArrival(pool, host, context, read(), num_groups=1))
            pool.land()

        times.append(_fastest(restore, pool) / num_pieces)
        pool.release(context)
    if sizes[0] == sizes[1]:
        return ReadTime(0.0, times[0] / sizes[0])
    s_per_token = max(0.0, times[1] - times[0]) / (sizes[1] - sizes[0])
    return ReadTime(max(0.0, times[0] - s_per_token * sizes[0]), s_per_token)


def _zeros(pool: BlockPool, num_tokens: int) -> torch.Tensor:
    """KV of this many tokens, as `read` returns it."""
    context = Context([1] * num_tokens)
    pool.reserve(context, num_tokens)
    kv = torch.zeros_like(pool.read(context, 0, num_tokens))
    pool.release(context)
    return kv


def _fastest(action: Callable[[], object], pool: BlockPool) -> float:
    times = []
    for _ in range(_NUM_TRIES):
        started = time.perf_counter()
        action()
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)
        times.append(time.perf_counter() - started)
    return min(times)


def _drop_from_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
