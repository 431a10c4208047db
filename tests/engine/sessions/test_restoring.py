"""A session whose KV is being read from disk: the others go on, and each way in which that can end."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import (
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    MatchKind,
    OnMatch,
    SamplingParams,
    SessionConfig,
    TurnRequest,
)
from dayshift.engine.async_engine import AsyncEngine
from dayshift.engine.sessions import kv_reader, kv_tiers, payload_io
from dayshift.engine.sessions.kv_reader import ArchivedPiece, Fetch, KVReader
from dayshift.engine.sessions.restore_cost import (
    ArchiveLoad,
    PrefillTime,
    ReadTime,
    RestoreCost,
    SavedEntry,
)
from dayshift.engine.sessions.session_file import SessionFile
from dayshift.engine.sessions.store import SessionStore
from dayshift.engine.sessions.stored_piece import Tier
from tests.engine.driving import finish_reads, joined, run, take_turn, turn_request

NUM_BLOCKS = 128
NUM_TURNS = 3


class Disk:
    """Reads of KV payloads wait until `answers` is set, and fail with `error` if there is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.error: OSError | None = None
        self.num_reads = 0
        self._read_all = payload_io.record_format.read_all
        monkeypatch.setattr(payload_io.record_format, "read_all", self._read)

    def _read(self, fd: int, buffer: memoryview, offset: int, num_needed: int | None = None) -> None:
        if threading.current_thread().name == "dayshift-kv-read":
            self.num_reads += 1
            self.answers.wait()
            if self.error is not None:
                raise self.error
        self._read_all(fd, buffer, offset, num_needed)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.answers.set()
    finish_reads()


@pytest.fixture
def make_engine(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**fields: Any) -> Engine:
        fields = {
            "num_kv_blocks": NUM_BLOCKS,
            "device": "cpu",
            "window": 256,
            "restore": "read",
            "host_kv_bytes": 0,
            "store_dir": tmp_path,
        } | fields
        engines.append(Engine(EngineConfig(model=str(tiny_model_dir), **fields)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_invariants()
        engine.close()
    assert not any(thread.name.startswith("dayshift-kv-fetch") for thread in threading.enumerate())


def question(session_id: str, index: int) -> TurnRequest:
    return turn_request(session_id, f"Lift bowl {index}.", at=float(index))


def other_request() -> GenerateRequest:
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    return GenerateRequest(request_id="other", prompt_token_ids=(7, 8, 9), sampling=sampling)


def parked(engine: Engine, name: str = "robot") -> str:
    """A session of some turns, all of whose KV is on disk."""
    session_id = engine.open_session(SessionConfig(session_id=name, system="You lead.")).session_id
    for index in range(NUM_TURNS):
        take_turn(engine, question(session_id, index))
    engine.park_session(session_id)
    return session_id


def expected_reply(make_engine: Callable[..., Engine]) -> tuple[int, ...]:
    """That of the next turn, of a session that was never parked."""
    engine = make_engine(store_dir=None)
    session_id = engine.open_session(SessionConfig(system="You lead.")).session_id
    return [take_turn(engine, question(session_id, index)).token_ids for index in range(NUM_TURNS + 1)][-1]


def restoring(engine: Engine, disk: Disk, name: str = "robot") -> TurnRequest:
    """A call of a parked session whose KV is being read by a disk that does not answer yet."""
    session_id = parked(engine, name)
    disk.answers.clear()
    request = question(session_id, NUM_TURNS)
    engine.submit(request)
    assert engine.step() == []
    assert engine.session_manager.get(session_id).is_restoring
    return request


def steps(engine: Engine) -> list[GenerateChunk]:
    """Steps until nothing is left to do but to wait for the disk."""
    chunks: list[GenerateChunk] = []
    while engine.can_step:
        chunks += engine.step()
        engine.check_invariants()
    return chunks


def test_others_go_on_while_a_session_is_read(make_engine: Callable[..., Engine], disk: Disk) -> None:
    expected = expected_reply(make_engine)
    engine = make_engine()
    request = restoring(engine, disk)
    engine.submit(other_request())
    chunks = steps(engine)
    assert [chunk.request_id for chunk in chunks] == ["other"] * 6
    assert engine.has_work
    stats = engine.stats()
    assert (stats.num_restoring_sessions, stats.num_waiting) == (1, 1)
    assert stats.num_fetched_kv_bytes > 0

    disk.answers.set()
    result = joined(run(engine)[request.request_id])
    assert result.token_ids == expected
    assert (result.ledger.recomputed, result.ledger.restored > 0) == (0, True)
    stats = engine.stats()
    assert (stats.num_restoring_sessions, stats.num_fetched_kv_bytes) == (0, 0)
    assert result.ledger.restore_ms / 1e3 >= stats.restore_wait_s > 0
    phases = [e.phase.value for e in engine.trace.since("", 0.0).events if e.request_id == request.request_id]
    assert phases == ["queued", "restore", "prefill", "decode", "done"]


@pytest.mark.parametrize("kind", ["hangs", "I/O error", "flipped bit"])
def test_what_the_disk_does_not_give_is_computed_and_holds_up_nobody(
    kind: str, make_engine: Callable[..., Engine], disk: Disk, tmp_path: Path
) -> None:
    expected = expected_reply(make_engine)
    engine = make_engine(store_read_deadline_s=0.2 if kind == "hangs" else 30.0)
    request = restoring(engine, disk)
    engine.submit(other_request())
    done = steps(engine)
    if kind == "I/O error":
        disk.error = OSError(errno.EIO, os.strerror(errno.EIO))
    elif kind == "flipped bit":
        (path,) = tmp_path.glob("*.session")
        data = bytearray(path.read_bytes())
        for place in range(4096, len(data), 512):
            data[place] ^= 1
        path.write_bytes(data)
    if kind != "hangs":
        disk.answers.set()
    chunks = [*done, *(chunk for parts in run(engine).values() for chunk in parts)]
    assert joined(c for c in chunks if c.request_id == "other").token_ids
    result = joined(c for c in chunks if c.request_id == request.request_id)
    assert result.token_ids == expected
    assert result.ledger.restored == 0
    assert result.ledger.recomputed > 0
    stats = engine.stats()
    assert 1 <= stats.num_refused_kv_pieces <= 2  # two are read at once
    assert stats.num_late_kv_reads == (stats.num_refused_kv_pieces if kind == "hangs" else 0)


def test_a_call_that_is_cancelled_while_it_is_read(make_engine: Callable[..., Engine], disk: Disk) -> None:
    expected = expected_reply(make_engine)
    engine = make_engine()
    request = restoring(engine, disk)
    engine.cancel(request.request_id)
    assert not engine.has_work  # nobody waits for the disk
    engine.check_invariants()
    assert engine.stats().num_fetched_kv_bytes == 0
    assert engine.session("robot").is_parked
    assert engine.pool.num_free == NUM_BLOCKS
    disk.answers.set()
    result = take_turn(engine, question("robot", NUM_TURNS))
    assert (result.token_ids, result.ledger.recomputed) == (expected, 0)
    assert engine.stats().num_refused_kv_pieces == 0


def test_a_session_that_is_deleted_while_it_is_read(
    make_engine: Callable[..., Engine], disk: Disk, tmp_path: Path
) -> None:
    """One of the same name gets nothing of it, though the disk answers late."""
    engine = make_engine()
    restoring(engine, disk)
    engine.close_session("robot")
    assert engine.sessions() == []
    assert list(tmp_path.glob("*.session")) == []
    namesake = engine.open_session(SessionConfig(session_id="robot", system="You lead.")).session_id
    request = question(namesake, 0)
    engine.submit(request)
    disk.answers.set()
    result = joined(run(engine)[request.request_id])
    assert (result.ledger.restored, result.ledger.recomputed) == (0, 0)
    assert [turn.index for turn in engine.session(namesake).turns] == [0]


@pytest.mark.parametrize("is_called", [False, True])
def test_an_engine_that_closes_while_a_session_is_read(
    is_called: bool, make_engine: Callable[..., Engine], disk: Disk
) -> None:
    """It does not wait for the disk, and gives the session to whoever opens it next."""
    expected = expected_reply(make_engine)
    engine = make_engine()
    if is_called:
        restoring(engine, disk)
    else:
        session_id = parked(engine)
        disk.answers.clear()
        engine.prefetch_session(session_id)
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(20)  # the disk would be waited for 30 s
    assert not closing.is_alive()
    disk.answers.set()
    result = take_turn(make_engine(), question("robot", NUM_TURNS))
    assert (result.token_ids, result.ledger.recomputed) == (expected, 0)


def test_a_session_that_is_taken_over_while_it_is_read(
    make_engine: Callable[..., Engine], disk: Disk, tmp_path: Path
) -> None:
    """Its call fails and leaves no trace, in the old file nor in the new one."""
    engine = make_engine()
    request = restoring(engine, disk)
    SessionStore(tmp_path).take_over("robot")
    disk.answers.set()
    last = run(engine)[request.request_id][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert "taken over by another engine" in (last.error or "")
    result = take_turn(engine, question("robot", NUM_TURNS))  # opened again: the other engine let it go
    assert result.ledger.recomputed == 0
    assert len(engine.session("robot").turns) == NUM_TURNS + 1


def test_a_forks_source_that_is_deleted_while_it_is_read(
    make_engine: Callable[..., Engine], disk: Disk
) -> None:
    """The fork has taken what it lacked, and reads its own."""
    expected = expected_reply(make_engine)
    engine = make_engine()
    branch = engine.fork_session(parked(engine)).session_id
    assert not engine.session_manager.get(branch).archive.has_kv(0)
    disk.answers.clear()
    request = question(branch, NUM_TURNS)
    engine.submit(request)
    engine.step()
    assert engine.session_manager.get(branch).is_restoring
    threading.Timer(0.1, disk.answers.set).start()  # the copy for the fork is read, too
    engine.close_session("robot")
    result = joined(run(engine)[request.request_id])
    assert (result.token_ids, result.ledger.recomputed) == (expected, 0)
    assert engine.stats().num_refused_kv_pieces == 0


@pytest.mark.parametrize("is_called", [False, True])
def test_a_session_that_is_prefetched_is_read_once(
    is_called: bool, make_engine: Callable[..., Engine], disk: Disk
) -> None:
    expected = expected_reply(make_engine)
    engine = make_engine()
    session_id = parked(engine)
    disk.answers.clear()
    assert engine.prefetch_session(session_id).is_parked
    engine.prefetch_session(session_id)
    request = question(session_id, NUM_TURNS)
    if is_called:
        engine.submit(request)
        assert steps(engine) == []
    disk.answers.set()
    chunks = run(engine)
    if not is_called:
        assert not engine.session(session_id).is_parked
        engine.submit(request)
        chunks = run(engine)
    result = joined(chunks[request.request_id])
    assert (result.token_ids, result.ledger.recomputed) == (expected, 0)
    assert disk.num_reads == NUM_TURNS + 1  # and the system prompt
    stats = engine.stats()
    assert stats.num_tokens_from_archive == stats.num_restored_tokens > 0


def test_a_prefetched_session_that_is_parked_while_it_is_read(
    make_engine: Callable[..., Engine], disk: Disk
) -> None:
    engine = make_engine()
    session_id = parked(engine)
    disk.answers.clear()
    engine.prefetch_session(session_id)
    engine.park_session(session_id)
    assert not engine.has_work
    assert engine.session(session_id).is_parked


def test_an_engine_in_a_thread_sleeps_until_the_disk_answers(
    tiny_model_dir: Path, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes messages meanwhile, and no steps."""
    config = EngineConfig(
        model=str(tiny_model_dir), device="cpu", num_kv_blocks=NUM_BLOCKS, window=256, restore="read",
        host_kv_bytes=0, store_dir=tmp_path,
    )  # fmt: skip
    num_steps, step = 0, Engine.step

    def count(engine: Engine) -> list[GenerateChunk]:
        nonlocal num_steps
        num_steps += 1
        return step(engine)

    monkeypatch.setattr(Engine, "step", count)

    async def reply(engine: AsyncEngine, request: TurnRequest) -> list[GenerateChunk]:
        async with await engine.submit(request) as stream:
            return [chunk async for chunk in stream]

    async def main() -> None:
        engine = await AsyncEngine.start(config, in_process=True)
        await engine.open_session(SessionConfig(session_id="robot", system="You lead."))
        await reply(engine, question("robot", 0))
        await engine.park_session("robot")
        disk.answers.clear()
        call = asyncio.create_task(reply(engine, question("robot", 1)))
        while (await engine.stats())["num_restoring_sessions"] == 0:
            await asyncio.sleep(0.01)
        num_before = num_steps
        await asyncio.sleep(0.2)
        assert num_steps == num_before
        assert (await engine.stats())["num_restoring_sessions"] == 1
        disk.answers.set()
        last = (await asyncio.wait_for(call, 60))[-1]
        assert last.ledger is not None
        assert (last.ledger.restored > 0, last.ledger.recomputed) == (True, 0)
        await engine.close()

    asyncio.run(main())


def test_memory_for_what_is_read_is_bounded(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many sessions that are called at once, some are read at a time; one may take more by itself."""
    monkeypatch.setattr(kv_tiers, "_MAX_FETCHED_BYTES", 1)
    engine = make_engine(num_kv_blocks=48)
    names = [parked(engine, f"robot-{number}") for number in range(6)]
    for name in names:
        engine.submit(question(name, NUM_TURNS))
    answered, most = 0, 0
    while engine.has_work:
        answered += sum(chunk.finish_reason is FinishReason.LENGTH for chunk in engine.step())
        engine.check_invariants()
        held = [s for s in engine.session_manager.list_ids() if engine.session_manager.get(s).fetched]
        most = max(most, len(held))
    assert answered == 6
    assert most <= 1  # none, where what was read was used in the step that took it up
    assert engine.stats().num_restored_tokens > 0
    assert engine.stats().num_refused_kv_pieces == 0


def test_what_is_compared_with_a_question_is_read_a_few_turns_at_a_time(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turns that come back are those that come back from host memory."""

    def recalled(engine: Engine) -> tuple[int, ...]:
        session_id = engine.open_session(SessionConfig(system="Lead.", window=128)).session_id
        for index in range(40):
            take_turn(
                engine, turn_request(session_id, "ab cd"[index % 3 :] * 4, at=float(index), max_tokens=2)
            )
        engine.set_triggers(session_id, (OnMatch(match=MatchKind.SEMANTIC, similar_n=2),))
        engine.park_session(session_id)
        return take_turn(engine, turn_request(session_id, "cd" * 4, at=50.0)).recalled_turns

    in_memory = recalled(make_engine(store_dir=None, host_kv_bytes=1 << 24))
    engine, asked = make_engine(), list[int]()
    ask = KVReader.ask

    def count(self: KVReader, fetch: Fetch, pieces: Sequence[ArchivedPiece]) -> None:
        asked.append(len(pieces))
        ask(self, fetch, pieces)

    monkeypatch.setattr(KVReader, "ask", count)
    assert recalled(engine) == in_memory
    assert len(in_memory) == 2
    assert len(asked) > 2
    assert max(asked) <= 16


# --- what it costs -----------------------------------------------------------------------------


COST = RestoreCost({tier: ReadTime(0.001, 1e-5) for tier in Tier}, PrefillTime(((100, 0.01),)))
ENTRIES = [SavedEntry(100, Tier.ARCHIVE)] * 10  # 2 ms each to read, 10 ms each to compute


@given(
    queued=st.lists(st.integers(1, 2000), max_size=8),
    recent=st.lists(st.tuples(st.integers(1, 2000), st.floats(1e-4, 1.0)), max_size=8),
)
def test_the_cheapest_cut_counts_the_queue_and_how_slow_the_disk_is(
    queued: list[int], recent: list[tuple[int, float]]
) -> None:
    load = ArchiveLoad(num_readers=2, queued=tuple(queued), recent=tuple(recent))
    alone = [0.001 + 1e-5 * num_tokens for num_tokens, _ in recent]
    slowdown = sum(seconds for _, seconds in recent) / sum(alone) if recent else 1.0
    ahead_s = sum(0.001 + 1e-5 * num_tokens for num_tokens in queued)

    def seconds(num_read: int) -> float:
        wait_s = max(0.002, (ahead_s + 0.002 * num_read) / 2) if num_read else 0.0
        return slowdown * wait_s + 1e-4 * (100 * (10 - num_read) + 20)

    chosen = COST.num_to_read(ENTRIES, 20, step_tokens=1000, load=load)
    assert seconds(chosen) <= min(map(seconds, range(11))) + 1e-12


def test_a_disk_that_was_slow_is_tried_again_after_a_while(
    make_engine: Callable[..., Engine], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(restore="cheapest")
    monkeypatch.setattr(engine.session_manager.builder, "_cost", COST)
    session_id = parked(engine)
    now = kv_reader.time.monotonic()
    engine.tiers.reader._recent.append((now, 100, 60.0))  # 100 tokens took a minute
    assert take_turn(engine, question(session_id, NUM_TURNS)).ledger.restored == 0
    engine.park_session(session_id)
    monkeypatch.setattr(kv_reader, "_RECENT_S", -60.0)  # as if that minute were over
    assert take_turn(engine, question(session_id, NUM_TURNS + 1)).ledger.recomputed == 0


def test_kv_that_has_another_length_than_its_turn_is_computed(make_engine: Callable[..., Engine]) -> None:
    expected = expected_reply(make_engine)
    engine = make_engine()
    archive = engine.session_manager.get(parked(engine)).archive
    assert isinstance(archive, SessionFile)
    archive.append_kv(1, archive.read_kv(-1))
    result = take_turn(engine, question("robot", NUM_TURNS))
    assert result.token_ids == expected
    assert result.ledger.recomputed > 0
    assert engine.stats().num_refused_kv_pieces == 1
