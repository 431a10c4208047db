"""Stored KV that comes into the pool in groups of layers, while layers before them are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import SessionConfig, TurnRequest
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.models.decoder import DecoderLayer
from dayshift.engine.sessions import codecs, context_builder
from dayshift.engine.sessions.arrival import layer_groups
from dayshift.engine.sessions.record_format import KV_CODECS
from dayshift.engine.sessions.stored_piece import StoredPiece, cut
from tests.engine.driving import joined, run, take_turn, turn_request
from tests.engine.sessions.test_session_machine import first_layer_keys, run_machine

NUM_BLOCKS = 64


@pytest.fixture(autouse=True)
def in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where KV of some size comes group by group."""
    monkeypatch.setattr(ModelRunner, "waits_by_layer", lambda *_: True)
    monkeypatch.setattr(context_builder, "_GROUP_BYTES", 1)


@pytest.fixture
def make_engine(tiny_model_dir: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**fields: Any) -> Engine:
        fields = {"num_kv_blocks": NUM_BLOCKS, "device": "cpu", "window": 256, "restore": "read"} | fields
        engines.append(Engine(EngineConfig(model=str(tiny_model_dir), **fields)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_invariants()
        engine.close()


def open_session(engine: Engine, session_id: str) -> str:
    return engine.open_session(SessionConfig(session_id=session_id, system="You lead.")).session_id


def question(session_id: str, index: int) -> TurnRequest:
    return turn_request(session_id, f"Lift bowl {index}.", at=float(index))


def talk(engine: Engine, session_id: str, start: int, end: int) -> list[tuple[int, ...]]:
    """Replies of the turns from `start` to `end`."""
    return [take_turn(engine, question(session_id, index)).token_ids for index in range(start, end)]


# --- pieces of pieces --------------------------------------------------------------------------


@given(num_layers=st.integers(1, 60), num_groups=st.integers(1, 8))
def test_groups_are_all_layers_in_order(num_layers: int, num_groups: int) -> None:
    groups = layer_groups(num_layers, num_groups)
    assert [layer for group in groups for layer in group] == list(range(num_layers))
    assert len(groups) == min(num_groups, num_layers)
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


@given(
    layers=st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n))),
    num_tokens=st.integers(0, 40),
    part_bytes=st.integers(1, 500),
)
@settings(deadline=None)
@pytest.mark.parametrize("name", KV_CODECS)
def test_the_bytes_of_some_layers_are_a_payload_of_their_own(
    name: str, layers: tuple[int, int, int], num_tokens: int, part_bytes: int
) -> None:
    """However the whole payload lies in memory."""
    num_layers, *borders = layers
    asked = range(min(borders), max(borders))
    kv = torch.randn(2, num_layers, num_tokens, 2, 16, generator=torch.Generator().manual_seed(num_tokens))
    encoded = codecs.encode_payload(name, kv)
    form, payload = encoded.form, encoded.payload
    piece = StoredPiece(form, list(payload.split(part_bytes)))
    out = torch.empty(2, len(asked), num_tokens, 2, 16)
    parts = piece.parts_of(asked)
    codecs.decode_layers(form, torch.cat([torch.empty(0, dtype=torch.uint8), *parts]), out)
    whole = codecs.decode_payload(form, payload, dtype=torch.float32)
    assert torch.equal(out, whole[:, asked.start : asked.stop])


@given(st.lists(st.integers(0, 9), max_size=6), st.data())
def test_cut_gives_the_bytes_asked_for(sizes: list[int], data: st.DataObject) -> None:
    row = torch.arange(sum(sizes), dtype=torch.uint8)
    borders = st.tuples(*[st.integers(0, len(row))] * 2).map(sorted)
    ranges = [(start, end) for start, end in data.draw(st.lists(borders, max_size=4))]
    got = [int(byte) for view in cut(row.split(sizes) if sizes else [], ranges) for byte in view]
    assert got == [byte for start, end in ranges for byte in range(start, end)]


# --- sessions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("host_kv_bytes", [1 << 24, 0])
def test_a_layer_is_there_when_it_is_computed_and_not_much_before(
    host_kv_bytes: int, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_engine()
    expected = talk(plain, open_session(plain, "robot"), 0, 4)
    engine = make_engine(host_kv_bytes=host_kv_bytes)
    session_id = open_session(engine, "robot")
    got = talk(engine, session_id, 0, 3)
    context = engine.session_manager.get(session_id).context
    num_tokens = context.num_computed
    before = engine.pool.read(context, 0, num_tokens)
    engine.park_session(session_id)
    engine.pool.kv.zero_()

    present: list[list[bool]] = []

    def forward(layer: DecoderLayer, *args: Any) -> tuple[Tensor, Tensor]:
        slots = torch.tensor(engine.pool.slots(context, 0, num_tokens))
        now = engine.pool.kv.flatten(2, 3).index_select(2, slots)
        if len(present) < engine.model_config.num_layers:  # of the step that restores
            present.append([torch.equal(*both) for both in zip(now.unbind(1), before.unbind(1), strict=True)])
        return original(layer, *args)

    original = DecoderLayer.forward
    monkeypatch.setattr(DecoderLayer, "forward", forward)
    got += talk(engine, session_id, 3, 4)
    assert present == [[layer <= index for layer in range(4)] for index in range(4)]
    assert got == expected


def test_all_is_there_before_a_captured_step(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph cannot wait for anything inside: one group, which lands before its first layer."""
    engine = make_engine()
    session_id = open_session(engine, "robot")
    talk(engine, session_id, 0, 3)
    engine.park_session(session_id)
    monkeypatch.setattr(ModelRunner, "waits_by_layer", lambda *_: False)
    written: list[range] = []
    write_layers = engine.pool.write_layers

    def write(slots: list[int], layers: range, piece: Tensor) -> None:
        written.append(layers)
        write_layers(slots, layers, piece)

    monkeypatch.setattr(engine.pool, "write_layers", write)
    talk(engine, session_id, 3, 4)
    assert written == [range(engine.model_config.num_layers)]


def check_keys(engine: Engine, session_id: str) -> None:
    """The first layer's key at each computed place is that of the token that stands there."""
    context = engine.session_manager.get(session_id).context
    num_tokens = context.num_computed
    keys = engine.pool.read(context, 0, num_tokens)[0, 0]
    torch.testing.assert_close(keys, first_layer_keys(engine, context.token_ids[:num_tokens]))


@pytest.mark.parametrize("is_parked_again", [False, True])
def test_a_call_that_is_cancelled_before_its_kv_has_come(
    is_parked_again: bool, make_engine: Callable[..., Engine]
) -> None:
    """Its KV comes all the same, into blocks that are still its own."""
    plain = make_engine()
    expected = talk(plain, open_session(plain, "robot"), 0, 3)

    engine = make_engine(run_ahead=True, speculation="off", num_kv_blocks=24)
    running, parked = (open_session(engine, name) for name in ("running", "parked"))
    assert talk(engine, running, 0, 2) == talk(engine, parked, 0, 2) == expected[:2]
    engine.park_session(parked)
    request, cancelled = question(running, 2), question(parked, 2)
    engine.submit(request)
    chunks = engine.step()  # and the step after it is launched
    engine.submit(cancelled)
    chunks += engine.step()  # admits the other call, and computes none of it
    assert engine.pool.has_arrivals
    engine.cancel(cancelled.request_id)
    if is_parked_again:
        engine.park_session(parked)
        assert not engine.pool.has_arrivals
        other = open_session(engine, "in its blocks")
        engine.submit(question(other, 0))
    chunks += [chunk for chunk in chain(*run(engine).values()) if chunk.request_id == request.request_id]
    assert joined(chunks).token_ids == expected[2]
    for session in (
        engine.session_manager.get(session_id) for session_id in engine.session_manager.list_ids()
    ):
        check_keys(engine, session.session_id)
    assert talk(engine, parked, 2, 3) == expected[2:]


@pytest.mark.parametrize("host_kv_bytes", [1 << 24, 0])
def test_a_prefetched_session_that_is_forked_and_parked_before_a_step(
    host_kv_bytes: int, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine(host_kv_bytes=host_kv_bytes, store_dir=tmp_path)
    session_id = open_session(engine, "robot")
    talk(engine, session_id, 0, 3)
    engine.park_session(session_id)
    engine.prefetch_session(session_id)
    run(engine)  # until it is read
    assert engine.pool.has_arrivals
    branch = engine.fork_session(session_id).session_id
    engine.park_session(session_id)
    check_keys(engine, branch)
    assert talk(engine, branch, 3, 4) == talk(engine, session_id, 3, 4)


def test_one_session_at_a_time_is_on_its_way(make_engine: Callable[..., Engine]) -> None:
    """Each takes memory beside the pool until it is there."""
    engine = make_engine()
    names = [open_session(engine, name) for name in ("first", "second", "third")]
    for name in names:
        talk(engine, name, 0, 2)
        engine.park_session(name)
    engine.pool.kv.zero_()
    for name in names:
        engine.prefetch_session(name)
    contexts = [engine.session_manager.get(name).context for name in names]
    keys = engine.pool.kv[0].flatten(1, 2)
    is_there = [bool(keys[:, engine.pool.slots(c, 0, c.num_computed)].any()) for c in contexts]
    assert is_there == [True, True, False]
    for name in names:
        check_keys(engine, name)


def test_sessions_whose_kv_comes_in_groups_hold_what_a_plain_list_would(tiny_model_dir: Path) -> None:
    run_machine(tiny_model_dir, max_examples=6, num_steps=20)
