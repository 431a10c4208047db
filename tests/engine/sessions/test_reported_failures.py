"""Failures of other engines that no other test here would show; `failures.toml` has all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import GenerateRequest, GenerateResult, SamplingParams, SessionConfig
from dayshift.engine.sequence import Sequence
from dayshift.engine.sessions.kv_tiers import KVTiers
from dayshift.engine.sessions.records import SYSTEM
from dayshift.engine.sessions.session_file import SessionFile
from tests.engine.driving import run, take_turn, turn_request

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture
def make_engine(tiny_model_dir: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**fields: Any) -> Engine:
        fields = {"num_kv_blocks": 128, "device": "cpu", "window": 512, "restore": "read"} | fields
        engines.append(Engine(EngineConfig(model=str(tiny_model_dir), **fields)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_invariants()
        engine.close()


def open_session(engine: Engine, session_id: str | None = "robot") -> str:
    return engine.open_session(SessionConfig(session_id=session_id, system="You lead.")).session_id


def talk(engine: Engine, session_id: str, start: int, end: int) -> list[GenerateResult]:
    return [
        take_turn(engine, turn_request(session_id, f"Step {i}: lift bowl {i}.", at=float(i)))
        for i in range(start, end)
    ]


def tokens(results: list[GenerateResult]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


def test_what_is_in_the_pool_is_never_read_back(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer state wins, though an older one was restored (llama.cpp#28276)."""
    plain = make_engine()
    expected = tokens(talk(plain, open_session(plain), 0, 6))
    engine = make_engine()
    session_id = open_session(engine)
    got = talk(engine, session_id, 0, 3)
    engine.park_session(session_id)
    got += talk(engine, session_id, 3, 4)
    assert got[-1].ledger.restored > 0

    def find(*_: object) -> None:
        raise AssertionError("read from a tier")

    monkeypatch.setattr(KVTiers, "find", find)
    engine.prefetch_session(session_id)
    got += talk(engine, session_id, 4, 6)
    assert tokens(got) == expected
    assert all(result.ledger.restored == result.ledger.recomputed == 0 for result in got[-2:])


def test_however_a_session_is_named_only_its_new_turn_is_computed(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """By its user, by the engine, as a fork, after a restart (llama.cpp#24746)."""
    engine = make_engine(store_dir=tmp_path)
    named, generated = open_session(engine), open_session(engine, None)
    results = {name: talk(engine, name, 0, 3)[-1] for name in (named, generated)}
    branch = engine.fork_session(named).session_id
    engine.close()
    engine = make_engine(store_dir=tmp_path)
    results |= {f"{name}, later": talk(engine, name, 3, 4)[0] for name in (named, generated, branch)}
    assert {result.ledger.computed for result in results.values()} == {results[named].ledger.computed}
    assert all(result.ledger.recomputed == 0 for result in results.values())


def test_a_new_session_in_used_blocks_answers_as_in_new_ones(make_engine: Callable[..., Engine]) -> None:
    """What others left in the memory is seen by nobody (koboldcpp#2158)."""
    clean, used = make_engine(), make_engine()
    used.pool.kv.normal_(std=100.0)
    assert tokens(talk(used, open_session(used), 0, 4)) == tokens(talk(clean, open_session(clean), 0, 4))


def test_a_restart_writes_no_kv_again(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    """The same files are used again, and read (LMCache#562, LMCache#1175)."""
    engine = make_engine(store_dir=tmp_path)
    session_id = open_session(engine)
    talk(engine, session_id, 0, 3)
    engine.close()
    (path,) = tmp_path.glob("*.session")
    before = path.read_bytes()
    for _ in range(2):
        engine = make_engine(store_dir=tmp_path)
        engine.prefetch_session(session_id)
        run(engine)
        assert engine.stats().num_tokens_from_archive > 0
        assert engine.session(session_id).num_kv_blocks > 0
        engine.park_session(session_id)
        engine.close()
        assert path.read_bytes() == before


@pytest.mark.parametrize("lost", [SYSTEM, 0, 1, 2, 3])
def test_any_piece_of_a_restore_may_fail(
    lost: int, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """What stands before it is read, the rest is computed, and the output is the same (vllm#49250)."""
    plain = make_engine()
    expected = tokens(talk(plain, open_session(plain), 0, 5))
    engine = make_engine(store_dir=tmp_path, host_kv_bytes=0)
    session_id = open_session(engine)
    got = talk(engine, session_id, 0, 4)
    engine.park_session(session_id)
    session = engine.session_manager.get(session_id)
    assert isinstance(session.archive, SessionFile)
    (path,) = tmp_path.glob("*.session")
    piece = session.archive.read_kv(lost).data.tobytes()
    data = bytearray(path.read_bytes())
    data[data.index(piece) + len(piece) // 3] ^= 1
    path.write_bytes(data)
    num_before = sum(len(session.token_ids_of(turn)) for turn in range(SYSTEM, lost))

    got += talk(engine, session_id, 4, 5)
    assert tokens(got) == expected
    ledger = got[-1].ledger
    assert ledger.restored == num_before
    assert ledger.restored + ledger.recomputed + ledger.computed == got[-1].num_prompt_tokens
    assert engine.stats().num_refused_kv_pieces == 1


def requests(num: int, num_prompt: int, name: str) -> list[GenerateRequest]:
    prompt = tuple(range(10, 10 + num_prompt))
    return [
        GenerateRequest(request_id=f"{name}{i}", prompt_token_ids=prompt, sampling=GREEDY) for i in range(num)
    ]


def test_a_large_request_is_not_passed_for_ever(make_engine: Callable[..., Engine]) -> None:
    """Small ones that come later wait for it, and for no longer than until it is admitted (vllm#31731)."""
    engine = make_engine(num_kv_blocks=16)
    first, later = requests(3, 30, "first"), requests(12, 30, "later")
    (large,) = requests(1, 200, "large")
    for request in (*first, large):
        engine.submit(request)
    order: list[str] = []
    while engine.has_work:
        if later:
            engine.submit(later.pop())  # always one more that would fit
        order += [chunk.request_id for chunk in engine.step() if chunk.request_id not in order]
    assert set(order[:3]) == {request.request_id for request in first}
    assert order[3] == large.request_id
    assert len(order) == 16


def test_an_admitted_request_never_waits_for_memory(make_engine: Callable[..., Engine]) -> None:
    """Nothing is admitted and preempted, admitted and preempted (vllm#37307)."""
    engine = make_engine(num_kv_blocks=16, speculation="off")
    for request in requests(10, 40, "r"):
        engine.submit(request)
    num_running: list[int] = []
    while engine.has_work:
        decoding: list[tuple[Sequence, int]] = [
            (sequence, len(sequence.output_ids))
            for sequence in engine.scheduler.running
            if sequence.is_decoding and not sequence.is_closing
        ]
        engine.step()
        assert all(len(sequence.output_ids) == num + 1 for sequence, num in decoding)
        num_running.append(len(engine.scheduler.running))
    assert max(num_running) == 4  # as many as have room to the end
