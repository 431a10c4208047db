"""An engine that takes long to close says how far it is."""

from __future__ import annotations

import logging
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import SessionConfig
from dayshift.engine.sessions import closing
from tests.engine.driving import take_turn, turn_request


@pytest.mark.parametrize(("seconds", "told"), [(0.1, []), (1.5, ["1 of 3"])])
def test_how_far_it_is_is_said_now_and_then(
    seconds: float,
    told: list[str],
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine(EngineConfig(model=str(tiny_model_dir), device="cpu", num_kv_blocks=64, window=256))
    for _ in range(3):
        session_id = engine.open_session(SessionConfig()).session_id
        take_turn(engine, turn_request(session_id, "Lift the bowl.", at=0.0))
    clock = count(0.0, seconds)
    monkeypatch.setattr(closing, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with caplog.at_level(logging.WARNING, logger=closing.__name__):
        engine.close()
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"closing: {number} sessions are in the store" for number in told]
    assert engine.stats().num_parked_sessions == 3
