"""Launching a step before the last one's tokens are read changes no answer and loses no block."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import GenerateRequest, Message, SamplingParams, SessionConfig, TurnRequest
from dayshift.types import DayshiftError
from tests.engine.scripts import Call, calls, play


@pytest.fixture(scope="module")
def engines(tiny_model_dir: Path) -> Iterator[tuple[Engine, Engine]]:
    """One that waits for every step, and one that runs ahead."""
    pair = tuple(
        Engine(
            EngineConfig(
                model=str(tiny_model_dir),
                num_kv_blocks=64,
                max_num_seqs=4,
                max_num_batched_tokens=48,
                window=512,
                run_ahead=runs_ahead,
                speculation="off",
            )
        )
        for runs_ahead in (False, True)
    )
    yield pair[0], pair[1]
    for engine in pair:
        engine.close()


@given(script=st.lists(calls, min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_every_answer_is_the_same(engines: tuple[Engine, Engine], script: list[Call]):
    plain, ahead = (play(engine, script) for engine in engines)
    for number, call in enumerate(script):
        expected, actual = plain[f"call-{number}"], ahead[f"call-{number}"]
        if call.cancel_after is None:
            assert actual == expected
            assert actual.reason is not None
        else:  # how far it came by its cancel is not specified
            length = min(len(actual.token_ids), len(expected.token_ids))
            assert actual.token_ids[:length] == expected.token_ids[:length]
    for engine in engines:
        assert engine.pool.num_free == engine.pool.num_blocks
        assert not engine.has_work


def test_steps_do_run_ahead(engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch):
    """In steady decoding every step but the first finds its chunks launched."""
    _, engine = engines
    num_scheduled = 0
    schedule = engine.scheduler.schedule

    def counted():
        nonlocal num_scheduled
        num_scheduled += 1
        return schedule()

    monkeypatch.setattr(engine.scheduler, "schedule", counted)
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    for number in range(3):
        engine.submit(GenerateRequest(request_id=str(number), prompt_token_ids=(5, 6, 7), sampling=sampling))
    num_tokens = 0
    while engine.has_work:
        num_tokens += sum(len(chunk.token_ids) for chunk in engine.step())
    assert num_tokens == 60
    assert num_scheduled == 1


def test_a_turn_that_ended_early_is_whole(engines: tuple[Engine, Engine]):
    """The step that was launched for it wrote nothing that its session keeps."""
    replies: list[list[tuple[int, ...]]] = []
    for engine in engines:
        engine.open_session(SessionConfig(session_id="s"))
        replies.append([])
        for number in range(4):
            sampling = SamplingParams(max_tokens=30, ignore_eos=True, stop=("a", "o"))
            request = TurnRequest(
                request_id=f"turn-{number}",
                session_id="s",
                at=float(number),
                messages=(Message("user", f"Shift {number}: put the bowl on the plate."),),
                sampling=sampling,
            )
            engine.submit(request)
            token_ids: tuple[int, ...] = ()
            while engine.has_work:
                for chunk in engine.step():
                    if chunk.error is not None:
                        raise DayshiftError(chunk.error)
                    token_ids += chunk.token_ids
            replies[-1].append(token_ids)
        engine.close_session("s")
    assert replies[0] == replies[1]
