"""The trace of requests: every phase of every request, on the engine's clock, read by cursor."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine import Engine
from dayshift.engine.api import GenerateRequest, SamplingParams, SessionConfig
from dayshift.engine.config import EngineConfig
from dayshift.engine.trace import RequestPhase, Trace, TraceEvent, join_cursors
from tests.engine.driving import run, take_turn, turn_request

LIFE = [RequestPhase.QUEUED, RequestPhase.PREFILL, RequestPhase.DECODE, RequestPhase.DONE]
LIFE_OF_TURN = [RequestPhase.QUEUED, RequestPhase.RESTORE, *LIFE[1:]]


@pytest.fixture
def engine(tiny_model_dir: Path) -> Iterator[Engine]:
    config = EngineConfig(model=str(tiny_model_dir), kv_cache_bytes=8 << 20, window=512, max_num_seqs=1)
    engine = Engine(config)
    yield engine
    engine.close()


def by_request(events: tuple[TraceEvent, ...]) -> dict[str, list[TraceEvent]]:
    found: dict[str, list[TraceEvent]] = {}
    for event in events:
        found.setdefault(event.request_id, []).append(event)
    return found


def generate_request(name: str, max_tokens: int = 4) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_token_ids=(1, 2, 3), sampling=sampling)


def test_phases_of_a_turn_and_of_stateless_requests_one_after_the_other(engine: Engine) -> None:
    begun_at = time.monotonic()
    session_id = engine.open_session(SessionConfig()).session_id
    turn = turn_request(session_id, "put the bowl on the plate", 0.0)
    engine.submit(turn)
    engine.submit(generate_request("second"))
    run(engine)
    trace = engine.trace.since("", time.monotonic())
    events = by_request(trace.events)
    assert [event.phase for event in events[turn.request_id]] == LIFE_OF_TURN
    assert {event.session_id for event in events[turn.request_id]} == {session_id}
    assert [event.phase for event in events["second"]] == LIFE
    assert events["second"][0].session_id is None
    for life in events.values():
        times = [event.t for event in life]
        assert begun_at <= times[0]
        assert times == sorted(times)
        assert times[-1] <= trace.now_s
    # One at a time: the second waits in the queue until the first is done.
    assert events["second"][1].t >= events[turn.request_id][-1].t


def test_a_cancelled_request_has_failed(engine: Engine) -> None:
    engine.submit(generate_request("gone", max_tokens=400))
    engine.step()
    engine.cancel("gone")
    phases = [event.phase for event in engine.trace.since("", 0.0).events]
    assert phases == [*LIFE[:3], RequestPhase.FAILED]


def test_the_ledger_tells_the_same_times(engine: Engine) -> None:
    session_id = engine.open_session(SessionConfig()).session_id
    result = take_turn(engine, turn_request(session_id, "review", 0.0))
    _, _, prefill, decode, done = engine.trace.since("", 0.0).events
    assert result.ledger.prefill_ms == pytest.approx(1000 * (decode.t - prefill.t), abs=1e-6)
    assert result.ledger.decode_ms == pytest.approx(1000 * (done.t - decode.t), abs=50)


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 20))
def test_a_reader_gets_every_event_once_and_hears_how_many_it_missed(bursts: list[int], size: int) -> None:
    trace, other, cursor = Trace(max_events=size), Trace(), ""
    read: list[int] = []
    num_missed = 0
    numbers = itertools.count()
    for burst in bursts:
        for _ in range(burst):
            trace.add(0.0, f"r{next(numbers)}", None, RequestPhase.QUEUED)
        found = trace.since(cursor, 0.0)
        cursor = join_cursors([other.since(cursor, 0.0), found])  # as behind a router
        assert [event.request_id for event in found.events] == [f"r{event.number}" for event in found.events]
        read += [event.number for event in found.events]
        num_missed += found.num_missed
    assert read == sorted(set(read))
    assert len(read) + num_missed == sum(bursts)


def test_a_cursor_of_an_engine_before_this_one_begins_anew() -> None:
    before, trace = Trace(), Trace()
    before.add(0.0, "old", None, RequestPhase.QUEUED)
    trace.add(0.0, "new", None, RequestPhase.QUEUED)
    (event,) = trace.since(before.since("", 0.0).cursor, 0.0).events
    assert event.request_id == "new"
