"""A list of many sessions holds up nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dayshift.engine import Engine, EngineConfig, session_listing
from dayshift.engine.api import EngineError, InvalidRequestError, SessionConfig, SessionInfo
from dayshift.engine.session_listing import SessionListing
from tests.engine.driving import take_turn, turn_request

NAMES = [f"robot-{number}" for number in range(6)]


@pytest.fixture
def config(tiny_model_dir: Path, tmp_path: Path) -> EngineConfig:
    return EngineConfig(
        model=str(tiny_model_dir),
        device="cpu",
        num_kv_blocks=128,
        window=256,
        store_dir=tmp_path,
        restore="read",
    )


def test_a_list_is_made_between_steps(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a store's sessions one is read between two steps; meanwhile one is called, one deleted, one new."""
    monkeypatch.setattr(session_listing, "_SLICE_S", 0.0)
    engine = Engine(config)
    for name in NAMES:
        engine.open_session(SessionConfig(session_id=name, system="You lead."))
        take_turn(engine, turn_request(name, "Step 1.", at=1.0, max_tokens=1))
    engine.close()
    engine = Engine(config)
    listing = SessionListing(engine.session_manager.infos)
    listing.ask(7)
    listing.ask(8)
    assert [listing.step() for _ in range(2)] == [[], []]
    take_turn(engine, turn_request(NAMES[3], "Step 2.", at=2.0, max_tokens=1))
    engine.close_session(NAMES[4])
    engine.open_session(SessionConfig(session_id="new"))
    answers, num_steps = [], 2
    while listing.has_work:
        answers += listing.step()
        num_steps += 1
    (first, early), (second, late) = answers
    assert (first, second) == (7, 8)
    assert isinstance(early, list)
    assert [info.session_id for info in early] == [name for name in NAMES if name != NAMES[4]]
    assert [len(info.turns) for info in early] == [1, 1, 1, 2, 1]
    assert late == engine.sessions()
    assert num_steps == len(early) + 1 + len(late) + 1
    engine.close()


def test_a_list_that_fails_fails_its_call_alone() -> None:
    errors: list[Exception] = [InvalidRequestError("no"), RuntimeError("bug")]

    def infos() -> Iterator[SessionInfo]:
        if errors:
            raise errors.pop(0)
        yield from ()

    listing = SessionListing(infos)
    for call_id in range(3):
        listing.ask(call_id)
    (refused,), (failed,), (empty,) = (listing.step() for _ in range(3))
    assert isinstance(refused[1], InvalidRequestError)
    assert (type(failed[1]), str(failed[1])) == (EngineError, "internal error, see the server's log")
    assert empty == (2, [])
    assert not listing.has_work
