"""Launching a step before the last one's tokens are read changes no answer and loses no block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import (
    FinishReason,
    GenerateRequest,
    Message,
    SamplingParams,
    SessionConfig,
    TurnRequest,
)
from dayshift.types import DayshiftError


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


@dataclass
class Call:
    """One request, when it is submitted and when it is cancelled, in steps."""

    sampling: SamplingParams
    prompt: list[int]
    submit_at: int
    cancel_after: int | None
    is_turn: bool


calls = st.builds(
    Call,
    sampling=st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 12),
        temperature=st.sampled_from([0.0, 0.0, 0.8]),
        seed=st.integers(0, 99),
        ignore_eos=st.booleans(),
        stop=st.sampled_from([(), ("e",), (" ",)]),
        logprobs=st.sampled_from([None, None, 2]),
        json_schema=st.sampled_from([None, None, None, {"type": "integer", "minimum": 0, "maximum": 999}]),
    ),
    prompt=st.lists(st.integers(3, 500), min_size=1, max_size=70),
    submit_at=st.integers(0, 12),
    cancel_after=st.none() | st.integers(0, 8),
    is_turn=st.booleans(),
)


@dataclass
class Outcome:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: FinishReason | None = None


def play(engine: Engine, script: list[Call]) -> dict[str, Outcome]:
    """Run a script to its end; what every request got."""
    outcomes: dict[str, Outcome] = defaultdict(Outcome)
    waiting, step = list(enumerate(script)), 0
    cancels: dict[int, list[str]] = defaultdict(list)
    sessions: list[str] = []
    while waiting or engine.has_work:
        for number, call in [item for item in waiting if item[1].submit_at <= step]:
            request_id = f"call-{number}"
            if call.is_turn:
                sessions.append(f"session-{number}")
                engine.open_session(SessionConfig(session_id=sessions[-1]))
                request = TurnRequest(
                    request_id=request_id,
                    session_id=sessions[-1],
                    at=0.0,
                    messages=(Message("user", f"step {number}"),),
                    sampling=call.sampling,
                )
            else:
                request = GenerateRequest(
                    request_id=request_id, prompt_token_ids=tuple(call.prompt), sampling=call.sampling
                )
            engine.submit(request)
            if call.cancel_after is not None:
                cancels[step + call.cancel_after].append(request_id)
        waiting = [item for item in waiting if item[1].submit_at > step]
        for request_id in cancels.pop(step, []):
            engine.cancel(request_id)
        for chunk in engine.step():
            outcome = outcomes[chunk.request_id]
            outcome.token_ids += chunk.token_ids
            outcome.text += chunk.text
            assert outcome.reason is None, "nothing follows the last chunk"
            outcome.reason = chunk.finish_reason
        step += 1
        assert step < 2000
    for session_id in sessions:
        engine.close_session(session_id)
    return outcomes


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
