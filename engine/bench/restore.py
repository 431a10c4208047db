"""Reading a parked session back against computing it again: `dayshift bench restore`.

The same parked session is called three ways: its KV is read, or computed again, or the engine chooses by
what it measured when it started. A time is that of the whole call up to the first new token's logits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from dayshift.engine.api import RecallMode, SessionConfig
from dayshift.engine.block_pool import Chunk
from dayshift.engine.engine import Engine
from dayshift.engine.sessions.layout import CallPlan, Entry
from dayshift.engine.sessions.records import TurnRecord
from dayshift.engine.sessions.restore_cost import ReadTime, RestoreCost
from dayshift.engine.sessions.session import Session
from dayshift.engine.sessions.stored_piece import Tier
from dayshift.types import DayshiftError

NUM_NEW_TOKENS = 32
_TURN_TOKENS = 64
_NUM_TRIES = 3  # the fastest counts
_NEVER = ReadTime(1e9, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRow:
    """One line of the table; times in ms."""

    num_tokens: int
    tier: Tier
    read_ms: float
    compute_ms: float
    chosen_ms: float
    choice: str  # "read", "compute", or "both"

    @property
    def ratio(self) -> float:
        """Of the chosen way to the better of the two."""
        return self.chosen_ms / min(self.read_ms, self.compute_ms)


def compare_restores(engine: Engine, sizes: tuple[int, ...]) -> Iterator[RestoreRow]:
    """A row for each number of tokens and each tier. The engine is started with `restore="cheapest"`."""
    cost = engine.restore_cost
    if cost is None:
        raise DayshiftError('bench restore needs an engine that measures: restore "cheapest"')
    computing = replace(cost, read=dict.fromkeys(Tier, _NEVER))
    for num_tokens in sizes:
        session = _session(engine, num_tokens)
        for tier in Tier:
            if tier is Tier.ARCHIVE:
                engine.tiers.flush(session)
                engine.tiers.forget(session.session_id)
            chosen_ms, choice = _time_call(engine, session, cost)
            yield RestoreRow(
                num_tokens=num_tokens,
                tier=tier,
                read_ms=_time_call(engine, session, None)[0],
                compute_ms=_time_call(engine, session, computing)[0],
                chosen_ms=chosen_ms,
                choice=choice,
            )
        engine.close_session(session.session_id)


def _session(engine: Engine, num_tokens: int) -> Session:
    """A parked session of turns of random tokens."""
    info = engine.open_session(SessionConfig(window=engine.max_context, recall_budget=0))
    session = engine.session_manager.get(info.session_id)
    generator = torch.Generator().manual_seed(num_tokens)
    for index in range(num_tokens // _TURN_TOKENS):
        ids = torch.randint(0, engine.model_config.vocab_size, (_TURN_TOKENS,), generator=generator).tolist()
        session.archive.append_turn(TurnRecord(index=index, at=0.0, messages=(), token_ids=tuple(ids)))
        session.entries = (*session.entries, Entry(index))
    builder = engine.session_manager.builder.with_cost(None)
    builder.build(session, CallPlan(entries=session.entries), RecallMode.KV, num_new=0, num_extra=0)
    _compute(engine, session)
    builder.park(session)
    return session


def _time_call(engine: Engine, session: Session, cost: RestoreCost | None) -> tuple[float, str]:
    """The fastest of some calls, and what was chosen. The session is left parked."""
    times: list[float] = []
    builder = engine.session_manager.builder.with_cost(cost)
    plan = CallPlan(entries=session.entries)
    for _ in range(_NUM_TRIES):
        started = time.perf_counter()
        engine.tiers.fetch(session, builder.archived(session, plan, RecallMode.KV, num_new=NUM_NEW_TOKENS))
        while session.is_restoring:
            engine.tiers.take_up(waits=True)
        builder.build(session, plan, RecallMode.KV, num_new=NUM_NEW_TOKENS, num_extra=NUM_NEW_TOKENS)
        engine.tiers.end_fetch(session)
        session.context.token_ids += [1] * NUM_NEW_TOKENS
        _compute(engine, session)
        times.append((time.perf_counter() - started) * 1e3)
        session.context.token_ids = session.layout_token_ids(session.entries)
        engine.pool.release(session.context)
        session.is_parked = True
    choice = next(iter(builder.num_choices), "read")
    return min(times), choice


def _compute(engine: Engine, session: Session) -> None:
    """Compute what the context lacks, in steps as the scheduler would make them."""
    context, most = session.context, engine.scheduler.max_num_batched_tokens
    while (num_left := len(context.token_ids) - context.num_computed) > 0:
        chunk = Chunk(context=context, num_tokens=min(num_left, most), needs_sampling=num_left <= most)
        engine.runner.run([chunk])
    if engine.pool.device.type == "cuda":
        torch.cuda.synchronize(engine.pool.device)
