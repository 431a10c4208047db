"""A turn that is submitted again, because its answer was lost, is taken once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from dayshift.engine import Engine
from dayshift.engine.api import InvalidRequestError, RequestIdInUseError, TokenLedger, TurnRequest
from tests.engine.driving import take_turn, turn_request
from tests.engine.sessions.test_sessions import make_engine as make_engine
from tests.engine.sessions.test_sessions import open_session, talk


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_turn_submitted_again_is_answered_from_its_record(
    is_restarted: bool, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine(store_dir=tmp_path)
    session_id = open_session(engine, window=256)
    talk(engine, session_id, 12)
    request = turn_request(session_id, "Review.", at=50.0, recall=(0.0, 2.0))
    first = take_turn(engine, request)
    if is_restarted:
        engine.close()
        engine = make_engine(store_dir=tmp_path)
    before = engine.session(session_id)
    num_steps = engine.stats().num_steps

    again = take_turn(engine, request)

    assert again == dataclasses.replace(first, ledger=TokenLedger(), is_repeated=True)
    assert engine.stats().num_steps == num_steps
    assert engine.session(session_id) == before
    assert before.turns[-1].request_id == request.request_id
    other = dataclasses.replace(request, at=51.0)
    with pytest.raises(InvalidRequestError, match="is that of turn 12 of session"):
        engine.submit(other)
    following = take_turn(engine, turn_request(session_id, "Go on.", at=52.0))
    assert not following.is_repeated


def test_a_cancelled_turn_submitted_again_runs(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    session_id = open_session(engine)
    request = turn_request(session_id, "one", at=0.0)
    engine.submit(request)
    engine.step()
    with pytest.raises(RequestIdInUseError):
        engine.submit(request)
    engine.cancel(request.request_id)
    assert not take_turn(engine, request).is_repeated
    branch = engine.fork_session(session_id).session_id
    forked = dataclasses.replace(request, session_id=branch)
    assert not take_turn(engine, forked).is_repeated  # the branch was never asked
    engine.submit(request)
    engine.cancel(request.request_id)
    assert not engine.has_work


def test_a_token_id_turn_submitted_again_is_answered_from_its_record(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    session_id = open_session(engine)
    request = TurnRequest(
        request_id="tokens", session_id=session_id, at=1.0, token_ids=tuple(range(200, 260))
    )
    assert take_turn(engine, request).token_ids == take_turn(engine, request).token_ids
    assert len(engine.session(session_id).turns) == 1
