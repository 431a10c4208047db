"""KV outside the GPU: host memory, then the archive; who is parked first; forks that share."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import GenerateResult, SessionConfig
from dayshift.engine.block_pool import Chunk
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.sessions import host_pool
from dayshift.engine.sessions.codecs import Encoded
from dayshift.engine.sessions.host_pool import HostPool
from dayshift.engine.sessions.record_format import KVFormat
from dayshift.engine.sessions.records import KVPiece
from dayshift.engine.sessions.restore_cost import ArchiveLoad, PrefillTime, ReadTime, RestoreCost, SavedEntry
from dayshift.engine.sessions.session_file import SessionFile, StoreFullError
from dayshift.engine.sessions.stored_piece import Tier
from tests.engine.driving import take_turn, turn_request

NUM_BLOCKS = 256
BLOCK_BYTES = 16384  # of the tiny model: 4 layers, 16 tokens
FORMAT = KVFormat("raw", "float32", 1, 1, 1, 1)


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


def open_session(engine: Engine, session_id: str = "robot") -> str:
    return engine.open_session(SessionConfig(session_id=session_id, system="You lead.")).session_id


def talk(engine: Engine, session_id: str, num_turns: int, start: int = 0) -> list[GenerateResult]:
    return [
        take_turn(engine, turn_request(session_id, f"Step {i}: lift bowl {i}.", at=float(i)))
        for i in range(start, start + num_turns)
    ]


def tiers(engine: Engine, session_id: str) -> set[Tier | None]:
    session = engine.session_manager.get(session_id)
    return {engine.tiers.tier_of(session, turn.index) for turn in session.turns}


# --- the pool of host memory -------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 70)), max_size=40))
@pytest.mark.parametrize("segment_bytes", [5, 30, 1 << 30])
def test_host_pool_gives_back_what_was_put(segment_bytes: int, actions: list[tuple[int, int]]) -> None:
    with mock.patch.object(host_pool, "_SEGMENT_BYTES", segment_bytes):
        pool = HostPool(num_bytes=160, block_bytes=10, device=torch.device("cpu"))
    expected: dict[int, torch.Tensor] = {}
    for number, (turn, num_bytes) in enumerate(actions):
        if turn in expected:
            pool.drop(("s", turn))
            del expected[turn]
        while pool.num_free < pool.num_blocks_for(num_bytes):
            _, oldest = next(iter(pool))
            pool.drop(("s", oldest))
            assert next(iter(expected)) == oldest
            del expected[oldest]
        payload = torch.full((num_bytes,), number % 251, dtype=torch.uint8)
        pool.put(("s", turn), Encoded(FORMAT, payload, is_sound=None))
        expected[turn] = payload
        pool.check()
        for other, bytes_put in list(expected.items()):
            form, parts = pool.get(("s", other))
            assert form == FORMAT
            assert torch.equal(torch.cat(parts), bytes_put)
            assert torch.equal(pool.deliver([[], parts]).wait()[1], bytes_put)
            assert pool.read(("s", other)).data.tolist() == bytes_put.tolist()
            expected[other] = expected.pop(other)  # used last
    assert pool.num_used_bytes == sum(-(-len(kv) // 10) * 10 for kv in expected.values())


# --- tiers of a session ------------------------------------------------------------------------


def test_parked_kv_is_in_host_memory_and_on_disk_only_when_that_is_full(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine(store_dir=tmp_path, host_kv_bytes=30 * BLOCK_BYTES)
    first, second = open_session(engine, "first"), open_session(engine, "second")
    expected = talk(engine, first, 3)
    size = (tmp_path / "first.session").stat().st_size
    engine.park_session(first)
    assert tiers(engine, first) == {Tier.HOST}
    assert (tmp_path / "first.session").stat().st_size == size
    assert engine.stats().num_host_kv_bytes > 0

    talk(engine, second, 8)
    engine.park_session(second)  # needs the room
    assert Tier.ARCHIVE in tiers(engine, first)
    assert tiers(engine, second) == {Tier.HOST}
    assert engine.stats().num_host_kv_bytes <= engine.stats().max_host_kv_bytes == 30 * BLOCK_BYTES

    result = talk(engine, first, 1, start=3)[0]
    assert result.ledger.restored > 0
    assert result.ledger.recomputed == 0
    from_archive, from_host = engine.stats().num_tokens_from_archive, engine.stats().num_tokens_from_host
    assert from_archive > 0
    assert from_archive + from_host == result.ledger.restored
    plain = make_engine()
    twin = open_session(plain)
    assert [r.token_ids for r in talk(plain, twin, 4)] == [r.token_ids for r in [*expected, result]]


@pytest.mark.parametrize(("codec", "host_blocks"), [("exact", 30), ("residual", 8)])
def test_what_is_computed_for_being_quicker_than_a_disk_comes_back_to_host_memory(
    codec: str,
    host_blocks: int,
    make_engine: Callable[..., Engine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a session that host memory once had no room for would be computed again at each call. What
    was read stays where it is: it is not put through its codec a second time."""
    engine = make_engine(
        store_dir=tmp_path, host_kv_bytes=host_blocks * BLOCK_BYTES, kv_at_rest=codec, restore="cheapest"
    )
    written: Counter[tuple[str, int]] = Counter()
    append_kv = SessionFile.append_kv

    def count(file: SessionFile, turn: int, piece: KVPiece) -> None:
        written[file.session.session_id, turn] += 1
        append_kv(file, turn, piece)

    monkeypatch.setattr(SessionFile, "append_kv", count)
    assert engine.restore_cost is not None
    first, second = open_session(engine, "first"), open_session(engine, "second")
    for slow, is_read in ((Tier.ARCHIVE, False), (None, True)):
        engine.restore_cost.read.update(dict.fromkeys(Tier, ReadTime(0.0, 0.0)))  # worth a write
        num_turns = len(engine.session_manager.get(first).turns)
        talk(engine, first, 3, start=num_turns)
        engine.park_session(first)
        for _ in range(8):  # takes all of the room
            talk(engine, second, 1, start=len(engine.session_manager.get(second).turns))
            engine.park_session(second)
        assert Tier.ARCHIVE in tiers(engine, first)
        if slow is not None:
            engine.restore_cost.read[slow] = ReadTime(10.0, 0.0)
        result = talk(engine, first, 1, start=num_turns + 3)[0]
        assert (result.ledger.restored > 0, result.ledger.recomputed > 0) == (is_read, not is_read)
        engine.park_session(first)
        assert (Tier.ARCHIVE in tiers(engine, first)) == is_read
    assert set(written.values()) == {1}


@pytest.mark.parametrize("host_blocks", [0, 3, 12, 1000])
def test_output_does_not_depend_on_the_tiers(
    host_blocks: int, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    plain = make_engine()
    twin = open_session(plain)
    expected = [r.token_ids for r in talk(plain, twin, 10)]
    engine = make_engine(store_dir=tmp_path, host_kv_bytes=host_blocks * BLOCK_BYTES)
    session_id = open_session(engine)
    got = []
    for index in range(10):
        result = talk(engine, session_id, 1, start=index)[0]
        assert result.ledger.recomputed == 0
        got.append(result.token_ids)
        engine.park_session(session_id)
    assert got == expected


def test_a_full_disk_loses_kv_and_nothing_else(
    make_engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parking is what makes room for others: it must not fail with the disk."""
    engine = make_engine(store_dir=tmp_path, host_kv_bytes=0, num_kv_blocks=40)
    first, second = open_session(engine, "first"), open_session(engine, "second")
    talk(engine, first, 4)

    def full(*_: object) -> None:
        raise StoreFullError("no space")

    monkeypatch.setattr(SessionFile, "append_kv", full)
    talk(engine, second, 8)
    talk(engine, first, 1, start=4)
    talk(engine, second, 2, start=8)
    assert engine.stats().num_lost_kv_pieces > 0
    assert len(engine.session(first).turns) == 5


# --- hints -------------------------------------------------------------------------------------


def test_prefetch_restores_before_the_call(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    session_id = open_session(engine)
    talk(engine, session_id, 3)
    engine.park_session(session_id)
    assert not engine.prefetch_session(session_id).is_parked
    restored = engine.stats().num_restored_tokens
    assert restored == len(engine.session_manager.get(session_id).context.token_ids)
    ledger = talk(engine, session_id, 1, start=3)[0].ledger
    assert (ledger.restored, ledger.recomputed) == (0, 0)
    assert ledger.reused == restored
    assert engine.stats().num_restored_tokens == restored


def test_prefetch_takes_no_blocks_from_others(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(num_kv_blocks=20)
    first, second = open_session(engine, "first"), open_session(engine, "second")
    talk(engine, first, 6)
    talk(engine, second, 6)
    assert engine.session(first).is_parked
    assert engine.prefetch_session(first).is_parked
    assert not engine.session(second).is_parked
    engine.submit(turn_request(second, "busy", at=9.0))
    assert not engine.prefetch_session(second).is_parked


@pytest.mark.parametrize(
    ("hints", "parked"),
    [
        ({}, "a"),
        ({"a": {"retain_until": time.time() + 3600}}, "b"),
        ({"a": {"retain_until": time.time() - 1}}, "a"),
        ({"a": {"priority": 1}}, "b"),
        ({"a": {"priority": 1}, "b": {"retain_until": time.time() + 3600}}, "c"),
    ],
)
def test_who_is_parked_first(
    hints: dict[str, dict[str, Any]], parked: str, make_engine: Callable[..., Engine]
) -> None:
    """The one used longest ago, but for hints; a hint never keeps others out."""
    engine = make_engine(num_kv_blocks=11, window=128)  # three short sessions and a half
    for session_id in ("a", "b", "c"):
        open_session(engine, session_id)
        request = turn_request(session_id, "Lift the bowl.", at=0.0)
        take_turn(engine, dataclasses.replace(request, **hints.get(session_id, {})))
    open_session(engine, "d")
    take_turn(engine, turn_request("d", "Lift the bowl.", at=0.0))
    assert [info.session_id for info in engine.sessions() if info.is_parked] == [parked]


# --- forks -------------------------------------------------------------------------------------


def test_a_fork_takes_no_blocks_until_one_of_the_two_writes(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    session_id = open_session(engine)
    talk(engine, session_id, 3)
    free = engine.pool.num_free
    branches = [engine.fork_session(session_id).session_id for _ in range(5)]
    assert engine.pool.num_free == free
    used = engine.stats().num_host_kv_bytes
    results = [talk(engine, branch, 1, start=3)[0] for branch in branches]
    assert engine.stats().num_host_kv_bytes == used
    assert all(result.ledger.recomputed == result.ledger.restored == 0 for result in results)
    assert len({result.token_ids for result in results}) == 1
    # Each has its last block and what it added for itself; the blocks before are shared.
    num_added = len(engine.session_manager.get(branches[0]).context.block_table) - (NUM_BLOCKS - free)
    assert free - engine.pool.num_free == 5 * (num_added + 1)
    assert talk(engine, session_id, 1, start=3)[0].token_ids == results[0].token_ids
    engine.check_invariants()


def test_forks_fit_where_copies_would_not(make_engine: Callable[..., Engine]) -> None:
    """A session that has to write to blocks it shares gets them by parking the other."""
    engine = make_engine(num_kv_blocks=20)
    session_id = open_session(engine)
    expected = talk(engine, session_id, 6)
    branch = engine.fork_session(session_id).session_id
    for index in range(6, 12):
        ours, theirs = (talk(engine, s, 1, start=index)[0] for s in (session_id, branch))
        assert ours.token_ids == theirs.token_ids
        engine.check_invariants()
    assert len(expected) == 6


@pytest.mark.parametrize("in_store", [False, True])
def test_a_fork_keeps_its_kv_when_its_source_is_deleted(
    in_store: bool, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine(store_dir=tmp_path if in_store else None)
    session_id = open_session(engine)
    talk(engine, session_id, 12)
    engine.park_session(session_id)
    branch = engine.fork_session(session_id).session_id
    twig = engine.fork_session(branch).session_id
    engine.close_session(session_id)
    engine.check_invariants()
    for name in (branch, twig):
        result = take_turn(engine, turn_request(name, "Review.", at=50.0, recall=(0.0, 2.0)))
        assert result.recalled_turns == (0, 1)
        assert (result.ledger.recomputed, result.ledger.recalled > 0) == (0, True)


# --- the cheaper of reading and computing ------------------------------------------------------

FAST, SLOW = ReadTime(0.001, 1e-5), ReadTime(0.1, 1e-3)
STEP = 32_768  # tokens of prompts that a step takes when nobody decodes


def cost(read: ReadTime, points: tuple[tuple[int, float], ...]) -> RestoreCost:
    return RestoreCost({Tier.HOST: FAST, Tier.ARCHIVE: read}, PrefillTime(points))


def test_the_cheaper_one_is_taken() -> None:
    saved = [SavedEntry(400, Tier.ARCHIVE), SavedEntry(300, Tier.ARCHIVE)]
    steady = ((16, 0.016), (1024, 1.024))
    assert cost(FAST, steady).num_to_read(saved, 20, step_tokens=STEP) == 2
    assert cost(SLOW, steady).num_to_read(saved, 20, step_tokens=STEP) == 0
    # What is near is read, the rest computed.
    mixed = [SavedEntry(400, Tier.HOST), SavedEntry(300, Tier.ARCHIVE)]
    assert cost(SLOW, steady).num_to_read(mixed, 20, step_tokens=STEP) == 1
    # A step that costs the same whatever its size computes a few turns for nothing.
    flat = ((16, 0.02), (1024, 0.0201))
    assert cost(FAST, flat).num_to_read(saved, 20, step_tokens=STEP) == 0
    # Beside others that decode it takes many such steps.
    assert cost(FAST, flat).num_to_read(saved, 20, step_tokens=100) == 2


@given(
    st.lists(st.tuples(st.integers(1, 500), st.sampled_from(Tier)), max_size=6),
    st.integers(1, 300),
    st.floats(1e-6, 1e-2),
    st.floats(1e-6, 1e-2),
    st.sampled_from([1, 17, 512, STEP]),
)
def test_no_cut_is_cheaper_than_the_chosen_one(
    sizes: list[tuple[int, Tier]], num_new: int, read_s: float, prefill_s: float, step_tokens: int
) -> None:
    saved = [SavedEntry(*size) for size in sizes]
    model = cost(ReadTime(0.0, read_s), ((10, 10 * prefill_s), (100, 100 * prefill_s)))

    def seconds(num_read: int) -> float:
        read = sum(model.read[entry.tier].of(entry.num_tokens) for entry in saved[:num_read])
        num_computed = num_new + sum(entry.num_tokens for entry in saved[num_read:])
        steps = [min(step_tokens, num_computed - at) for at in range(0, num_computed, step_tokens)]
        return read + sum(map(model.prefill.of, steps))

    chosen = model.num_to_read(saved, num_new, step_tokens=step_tokens)
    assert seconds(chosen) <= min(map(seconds, range(len(saved) + 1))) * (1 + 1e-9) + 1e-12


@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.sampled_from([1e-4, 1e-3]))
def test_what_is_kept_for_a_disk_is_what_a_call_would_read(sizes: list[int], prefill_s: float) -> None:
    model = cost(ReadTime(0.0, 1e-3), ((10, 10 * prefill_s), (100, 100 * prefill_s)))
    saved, load = [SavedEntry(size, Tier.ARCHIVE) for size in sizes], ArchiveLoad(num_readers=2)
    num_read = model.num_to_read(saved, 0, step_tokens=STEP, load=load)
    if model.is_sooner_read(sizes, num_readers=2):
        assert num_read > 0
    elif num_read == len(sizes):  # both take as long
        assert max(*sizes, sum(sizes) / 2) * 1e-3 == pytest.approx(model.prefill.of(sum(sizes)))


def test_two_pieces_are_read_at_once_where_it_is_decided_what_is_kept() -> None:
    model = cost(ReadTime(0.0, 1e-3), ((16, 0.3), (1024, 0.3)))
    assert model.is_sooner_read([100] * 4, num_readers=2)
    assert not model.is_sooner_read([100] * 4, num_readers=1)
    assert not model.is_sooner_read([400], num_readers=2)


@given(st.integers(1, 5000))
def test_prefill_time_grows_with_the_tokens(num_tokens: int) -> None:
    prefill = PrefillTime(((16, 0.01), (64, 0.011), (256, 0.02), (1024, 0.08)))
    assert prefill.of(num_tokens) <= prefill.of(num_tokens + 1)
    assert prefill.of(64) == pytest.approx(0.011)


def test_prefill_is_timed_with_different_tokens(make_engine: Callable[..., Engine]) -> None:
    """Equal ones take one path through a mixture's experts, and are computed sooner than any real prompt."""
    steps: list[list[int]] = []

    def run(runner: ModelRunner, chunks: Sequence[Chunk]) -> torch.Tensor:
        steps.extend(list(chunk.context.token_ids) for chunk in chunks)
        return run_model(runner, chunks)

    run_model = ModelRunner.run
    with mock.patch.object(ModelRunner, "run", run):
        make_engine(restore="cheapest")
    longest = max(steps, key=len)
    assert len(longest) >= 128
    assert len(set(longest)) > 64


@pytest.mark.parametrize(("read", "choice"), [(ReadTime(0.0, 0.0), "read"), (ReadTime(10.0, 1.0), "compute")])
def test_the_engine_does_what_is_cheaper(
    read: ReadTime, choice: str, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_engine()
    twin = open_session(plain)
    expected = [r.token_ids for r in talk(plain, twin, 4)]
    engine = make_engine(restore="cheapest")
    assert engine.restore_cost is not None
    stats = engine.stats()
    assert min(stats.host_read_us_per_token, stats.archive_read_us_per_token) >= 0
    assert stats.prefill_us_per_token > 0
    assert stats.num_free_kv_blocks == NUM_BLOCKS  # the measurement left nothing behind
    monkeypatch.setitem(engine.restore_cost.read, Tier.HOST, read)
    session_id = open_session(engine)
    got = [r.token_ids for r in talk(engine, session_id, 3)]
    engine.park_session(session_id)
    result = talk(engine, session_id, 1, start=3)[0]
    assert [*got, result.token_ids] == expected
    assert (result.ledger.restored > 0) == (choice == "read")
    assert (result.ledger.recomputed > 0) == (choice == "compute")
    assert (
        getattr(engine.stats(), {"read": "num_restores_read", "compute": "num_restores_computed"}[choice])
        == 1
    )
