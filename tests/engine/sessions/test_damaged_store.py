"""An engine on a store in which something is wrong: one session's fault is that session's alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import OnMatch, SessionConfig, TurnState
from dayshift.engine.sessions.record_format import KVFormat
from dayshift.engine.sessions.records import KVPiece, LayoutRecord
from dayshift.engine.sessions.session_file import StoreCorruptError
from dayshift.engine.sessions.store import SessionStore
from tests.engine.driving import run, take_turn, turn_request
from tests.engine.store.samples import PAGE_BYTES, file_size_limit


@pytest.fixture
def make_engine(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Callable[[], Engine]]:
    engines: list[Engine] = []

    def make() -> Engine:
        engines.append(
            Engine(
                EngineConfig(
                    model=str(tiny_model_dir),
                    device="cpu",
                    num_kv_blocks=128,
                    window=256,
                    store_dir=tmp_path,
                    restore="read",
                )
            )
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_invariants()
        engine.close()


def write_sessions(engine: Engine, *session_ids: str, num_turns: int = 4) -> None:
    for session_id in session_ids:
        engine.open_session(SessionConfig(session_id=session_id, system="You lead."))
        for i in range(num_turns):
            take_turn(engine, turn_request(session_id, f"Step {i} of {session_id}.", at=float(i)))
    engine.close()


def headers_of(path: Path) -> list[int]:
    data = path.read_bytes()
    return [at for at in range(0, len(data), PAGE_BYTES) if data[at : at + 4] == b"DSSR"]


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_the_others_are_listed_and_called(
    make_engine: Callable[[], Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_sessions(make_engine(), "first", "good", "middle")
    flip(tmp_path / "first.session", 30)
    flip(tmp_path / "middle.session", headers_of(tmp_path / "middle.session")[2] + 140)
    (tmp_path / "notes.session").write_text("not ours")
    (tmp_path / "not%20%ff.session").mkdir()
    engine = make_engine()
    with caplog.at_level(logging.WARNING):
        listed = [info.session_id for info in engine.sessions()]
    assert "good" in listed
    assert "first" not in listed
    assert "session first is not listed" in caplog.text
    for damaged in ("first", "middle", "notes"):
        with pytest.raises(StoreCorruptError):
            engine.submit(turn_request(damaged, "What now?", at=9.0))
    assert take_turn(engine, turn_request("good", "What now?", at=9.0)).ledger.restored


def test_a_mended_session_goes_on_and_its_kv_is_used(
    make_engine: Callable[[], Engine], tmp_path: Path
) -> None:
    """Turn 1 is lost. What is restored under the new numbers is the KV of the tokens that stand there."""
    write_sessions(make_engine(), "robot", "other")
    path = tmp_path / "robot.session"
    flip(path, headers_of(path)[3] + 140)
    mended = SessionStore(tmp_path).repair("robot")
    assert mended is not None
    assert mended.lost_turns == (1,)
    engine = make_engine()
    turns = engine.session("robot").turns
    assert [turn.text.partition(" of")[0] for turn in turns] == [
        "user: Step 0",
        "user: Step 2",
        "user: Step 3",
    ]
    reply = take_turn(engine, turn_request("robot", "What now?", at=9.0))
    assert reply.ledger.recomputed == 0
    assert reply.ledger.restored > 0
    engine.check_invariants()


def test_a_layout_of_turns_that_are_not_there_is_not_followed(
    make_engine: Callable[[], Engine], tmp_path: Path
) -> None:
    write_sessions(make_engine(), "robot")
    rule = OnMatch(text="review", last_n=1)
    layouts: tuple[dict[str, Any], ...] = (
        {"window_turns": (2, 9)},
        {"recalled_turns": (-1,)},
        {"num_turns": 9},
        {"window_turns": (3, 3)},
    )
    for layout in layouts:
        with SessionStore(tmp_path).open("robot") as file:
            fields: dict[str, Any] = {
                "num_turns": 4,
                "window_turns": (2,),
                "recalled_turns": (),
                "triggers": (rule,),
            } | layout
            file.append_layout(LayoutRecord(**fields))
        engine = make_engine()
        info = engine.session("robot")
        # The youngest turns below the low water, as of a session whose layout is not known.
        states = [turn.state for turn in info.turns]
        assert states == sorted(states)  # archived, then in the window
        assert states[-1] is TurnState.WINDOW
        assert info.triggers == (rule,)
        take_turn(engine, turn_request("robot", "What now?", at=9.0, max_tokens=1))
        engine.close()


def test_an_engine_starts_on_a_full_disk(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Nothing can be measured there. Its sessions are read, and a turn fails alone."""
    model, window = str(tiny_model_dir), 256
    config = EngineConfig(model=model, device="cpu", num_kv_blocks=128, window=window, store_dir=tmp_path)
    write_sessions(Engine(config), "robot")
    with file_size_limit(100):
        engine = Engine(config)
        engine.submit(turn_request("robot", "What now?", at=9.0))
        (last,) = run(engine).values()
        assert last[-1].is_store_full
        assert len(engine.session("robot").turns) == 4
    take_turn(engine, turn_request("robot", "What now?", at=9.0))
    engine.check_invariants()
    engine.close()
    assert not list(tmp_path.glob(".*"))


def test_turns_that_are_not_in_a_row_are_refused(make_engine: Callable[[], Engine], tmp_path: Path) -> None:
    write_sessions(make_engine(), "robot", num_turns=1)
    with SessionStore(tmp_path).open("robot") as file:
        file.turns.append(replace(file.turns[0], index=1))
        file.append_turn(replace(file.turns[0], index=2))
    with pytest.raises(StoreCorruptError, match="turn 2 stands behind 1 turns"):
        make_engine().session("robot")


@pytest.mark.parametrize("dims", [(1, 0, 0), (0, 0, 4), (0, -1, 0), (-1, 0, 0)])
def test_kv_of_another_shape_is_computed_again(
    make_engine: Callable[[], Engine], tmp_path: Path, dims: tuple[int, int, int]
) -> None:
    """Whole, and said to be this model's, and not of its shape: layers, heads or head dimension differ."""
    engine = make_engine()
    identity = engine.session_manager.store.identity  # type: ignore[union-attr]
    write_sessions(engine, "robot", "control")
    with SessionStore(tmp_path, identity).open("robot") as file:
        form = file.read_kv(1).format
        other = KVFormat(
            form.codec,
            form.dtype,
            form.num_layers + dims[0],
            form.num_tokens,
            form.num_kv_heads + dims[1],
            form.head_dim + dims[2],
        )
        itemsize = 4 if form.dtype == "float32" else 2
        data = np.zeros(int(np.prod(other.dims)) * itemsize, np.uint8)
        file.append_kv(1, KVPiece(other, data))
    engine = make_engine()
    reply = take_turn(engine, turn_request("robot", "What now?", at=9.0))
    assert reply.ledger.recomputed > 0
    assert engine.stats().num_refused_kv_pieces >= 1
    assert msgspec.json.encode(engine.session("robot"))
