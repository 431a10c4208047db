"""Codecs of KV at rest: round trips within their bounds, edge values, and sessions that live on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import RecallMode, SessionConfig
from dayshift.engine.quant.kv import dequantize_kv, quantize_kv
from dayshift.engine.sessions import codecs
from dayshift.engine.sessions.archive import KVUnavailableError
from dayshift.engine.sessions.codecs.packing import pack_bits, pack_nibbles, unpack_bits, unpack_nibbles
from dayshift.engine.sessions.codecs.rotation import rotate, rotate_back
from dayshift.engine.sessions.record_format import KV_CODECS, KVFormat
from dayshift.engine.sessions.records import KVPiece
from tests.engine.driving import take_turn, turn_request

CPU = torch.device("cpu")
LOSSY = [name for name in KV_CODECS if name != "raw"]

dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
dims = st.tuples(
    st.just(2),
    st.integers(1, 3),
    st.integers(0, 40),
    st.integers(1, 3),
    st.sampled_from([1, 5, 16, 48, 64, 128]),
)


def normal_kv(dims: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values as keys have them: an offset for each channel, heads of different size."""
    generator = torch.Generator().manual_seed(seed)
    *rows, num_heads, head_dim = dims
    offsets = 3 * torch.randn(num_heads, head_dim, generator=generator)
    sizes = torch.randn(num_heads, 1, generator=generator).exp()
    return ((torch.randn(*rows, num_heads, head_dim, generator=generator) + offsets) * sizes).to(dtype)


def there_and_back(name: str, kv: Tensor) -> Tensor:
    return codecs.decode(codecs.encode(name, kv), dtype=kv.dtype, device=CPU)


def row_errors(kv: Tensor, got: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of each head's error, and of the head."""
    return (got.double() - kv.double()).norm(dim=-1), kv.double().norm(dim=-1)


def test_every_codec_has_its_code() -> None:
    assert tuple(codecs.CODECS) == KV_CODECS


@given(dims=dims, dtype=dtypes, seed=st.integers(0, 2**30), size=st.integers(-12, 12))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", KV_CODECS)
def test_round_trip_within_the_codecs_bound(
    name: str, dims: tuple[int, ...], dtype: torch.dtype, seed: int, size: int
) -> None:
    kv = (normal_kv(dims, seed) * 2.0**size).clamp(-60_000, 60_000).to(dtype)
    got = there_and_back(name, kv)
    assert (got.shape, got.dtype) == (kv.shape, kv.dtype)
    if name == "raw":
        assert torch.equal(got, kv)
        return
    errors = (got.double() - kv.double()).abs()
    largest = kv.double().abs().amax(-1, keepdim=True)
    # What the pool's own dtype rounds away, and its smallest step where float16 runs out of range.
    rounding = largest * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal
    head_dim = dims[-1]
    match name:
        case "bf16":
            assert (errors <= kv.double().abs() * 2**-8 + rounding).all()
        case "int8":
            assert (errors <= largest / 127 * 0.502 + rounding).all()
        case "fp8":
            assert (errors <= kv.double().abs() / 16 + largest / 448 / 512 * 1.01 + rounding).all()
        case "rot4":  # half a step in each rotated value; no rotated value exceeds the head's norm
            error, norm = row_errors(kv, got)
            assert (error <= norm * math.sqrt(max(head_dim, 16)) / 15 * 1.01 + rounding[..., 0] * 12).all()
        case "residual":  # at worst all of a block lies in one place of the last, open cell
            error, norm = row_errors(kv, got)
            offset = kv.double().mean(2, keepdim=True).norm(dim=-1) if dims[2] >= 32 else 0.0
            assert (error <= norm + offset + rounding[..., 0] * 12 + 2**-38).all()


@pytest.mark.parametrize(
    ("name", "most"), [("bf16", 0.003), ("int8", 0.009), ("fp8", 0.028), ("rot4", 0.095)]
)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_error_of_values_as_models_have_them(name: str, most: float, head_dim: int) -> None:
    kv = normal_kv((2, 2, 100, 2, head_dim), seed=1)
    assert (there_and_back(name, kv) - kv).norm() / kv.norm() < most


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_error_of_the_residual_codec(head_dim: int) -> None:
    """Four planes for keys without their offset, two for values with theirs."""
    kv = normal_kv((2, 2, 100, 2, head_dim), seed=1)
    got = there_and_back("residual", kv)
    assert (got[0] - kv[0]).norm() / kv[0].norm() < 0.05
    assert (got[1] - kv[1]).norm() / kv[1].norm() < 0.36


@pytest.mark.parametrize(
    ("name", "ratio"), [("bf16", 1.0), ("int8", 1.93), ("fp8", 1.93), ("rot4", 3.5), ("residual", 5.0)]
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_ratio_to_bfloat16(name: str, ratio: float, head_dim: int) -> None:
    kv = normal_kv((2, 4, 100, 2, head_dim), seed=2, dtype=torch.bfloat16)
    assert kv.numel() * 2 / codecs.encode(name, kv).data.nbytes >= ratio


@pytest.mark.parametrize("name", KV_CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_zeros_stay_zeros(name: str, dtype: torch.dtype, num_tokens: int) -> None:
    kv = torch.zeros(2, 2, num_tokens, 2, 24, dtype=dtype)
    assert torch.equal(there_and_back(name, kv), kv)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_ends_of_the_range_stay_finite(name: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    limit = codecs.CODECS[name].limit
    assert limit is not None
    for number in (min(info.max, limit), info.tiny, info.smallest_normal / 4):
        kv = torch.full((2, 1, 2, 1, 16), number, dtype=dtype)
        kv[..., ::2] *= -1
        got = there_and_back(name, kv)
        assert torch.isfinite(got).all()
        error, norm = row_errors(kv, got)
        assert (error <= 1.1 * norm + 2**-38).all()


@pytest.mark.parametrize("name", KV_CODECS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_refused_and_kept_only_raw(name: str, value: float) -> None:
    kv = normal_kv((2, 1, 3, 1, 16), seed=3)
    kv[1, 0, 2, 0, 5] = value
    if name == "raw":
        assert there_and_back(name, kv).view(torch.int32).equal(kv.view(torch.int32))
    else:
        with pytest.raises(codecs.KVNotEncodableError, match=f"cannot be written as {name}, only as raw"):
            codecs.encode(name, kv)


@given(seed=st.integers(0, 2**30), dtype=st.sampled_from([torch.int8, torch.float8_e4m3fn]), dims=dims)
@settings(max_examples=60, deadline=None)
def test_quantising_again_changes_nothing(seed: int, dtype: torch.dtype, dims: tuple[int, ...]) -> None:
    """So a session parked from an int8 pool as int8 comes back bit by bit."""
    q, scale = quantize_kv(normal_kv(dims, seed), dtype)
    again, scale_again = quantize_kv(dequantize_kv(q, scale), dtype)
    assert torch.equal(again.view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(scale_again, scale)


@given(data=st.binary(min_size=1, max_size=40))
def test_packed_bits_and_nibbles_come_back(data: bytes) -> None:
    packed = torch.tensor(list(data), dtype=torch.uint8)
    assert torch.equal(pack_bits(unpack_bits(packed)), packed)
    assert torch.equal(pack_nibbles(unpack_nibbles(packed)), packed)


@pytest.mark.parametrize("head_dim", [1, 16, 24, 80, 96, 128, 256])
def test_rotation_keeps_norms_and_comes_back(head_dim: int) -> None:
    x = normal_kv((7, 2, head_dim), seed=4)
    rotated = rotate(x)
    torch.testing.assert_close(rotated.flatten(-2).norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotate_back(rotated, head_dim), x)


def test_pieces_of_unknown_codec_or_wrong_length_are_unavailable() -> None:
    piece = codecs.encode("int8", normal_kv((2, 1, 3, 1, 16), seed=5))
    with pytest.raises(KVUnavailableError, match="expected"):
        codecs.decode(KVPiece(piece.format, piece.data[:-1]), dtype=torch.float32, device=CPU)
    newer = KVFormat("code 9", "float32", 1, 3, 1, 16)
    with pytest.raises(KVUnavailableError, match="code 9, which this version does not know"):
        codecs.decode(KVPiece(newer, np.zeros(1, np.uint8)), dtype=torch.float32, device=CPU)


@pytest.fixture
def make_engine(tiny_model_dir: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**fields: Any) -> Engine:
        fields = {"host_kv_bytes": 0} | fields  # all goes to the archive at once
        config = EngineConfig(
            model=str(tiny_model_dir), device="cpu", num_kv_blocks=256, window=1024, restore="read", **fields
        )
        engines.append(Engine(config))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def talk(engine: Engine, session_id: str, numbers: range) -> None:
    for number in numbers:
        take_turn(engine, turn_request(session_id, f"Step {number}: open drawer {number}.", at=float(number)))


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("in_store", [False, True])
def test_a_session_is_parked_restored_and_recalled(
    name: str, in_store: bool, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine(kv_at_rest=name, store_dir=tmp_path if in_store else None)
    session_id = engine.open_session(SessionConfig(system="You lead.", window=200)).session_id
    talk(engine, session_id, range(9))
    engine.park_session(session_id)
    pieces = engine.session_manager.get(session_id).archive
    assert {pieces.read_kv(turn).format.codec for turn in range(-1, 9)} == {name}
    result = take_turn(
        engine, turn_request(session_id, "Which drawers?", at=99.0, recall=(0.0, 2.0), mode=RecallMode.KV)
    )
    assert result.recalled_turns == (0, 1)
    assert result.ledger.restored > 0
    assert result.ledger.recalled > 0
    assert result.ledger.recomputed == 0
    assert engine.stats().num_refused_kv_pieces == 0


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("host_kv_bytes", [0, 40_000, 1 << 24])
def test_kv_that_a_codec_cannot_hold_is_computed_again(
    name: str, host_kv_bytes: int, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """It is found out after the copy was made, and goes no further from there."""
    engine = make_engine(kv_at_rest=name, store_dir=tmp_path, host_kv_bytes=host_kv_bytes)
    session_id = engine.open_session(SessionConfig(system="You lead.")).session_id
    talk(engine, session_id, range(4))
    session = engine.session_manager.get(session_id)
    start = sum(len(session.token_ids_of(turn)) for turn in range(-1, 2))
    slots = engine.pool.slots(session.context, start, start + len(session.token_ids_of(2)))
    piece = engine.pool.read_slots(slots)
    piece[1, -1, 3, 0, 5] = math.nan
    engine.pool.write_slots(slots, piece)
    engine.park_session(session_id)
    result = take_turn(engine, turn_request(session_id, "Go on.", at=9.0))
    assert result.ledger.restored == start
    assert result.ledger.recomputed == sum(len(session.token_ids_of(turn)) for turn in (2, 3))
    assert engine.stats().num_refused_kv_pieces == 1
    engine.check_invariants()
    engine.park_session(session_id)
    engine.close()
    engine = make_engine(kv_at_rest=name, store_dir=tmp_path)
    restored = take_turn(engine, turn_request(session_id, "Go on.", at=10.0)).ledger
    assert (restored.recomputed, restored.restored > 0) == (0, True)


def test_a_file_may_hold_pieces_of_several_codecs(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    session_id = ""
    for start, name in enumerate(("exact", *LOSSY)):
        engine = make_engine(kv_at_rest=name, store_dir=tmp_path)
        if not session_id:
            session_id = engine.open_session(SessionConfig(window=200, recall_budget=800)).session_id
        talk(engine, session_id, range(3 * start, 3 * start + 3))
        engine.close()
    engine = make_engine(store_dir=tmp_path)
    archive = engine.session_manager.get(session_id).archive
    found = [archive.read_kv(turn).format.codec for turn in range(len(archive.turns))]
    assert found == [name for name in KV_CODECS for _ in range(3)]
    result = take_turn(engine, turn_request(session_id, "Which?", at=99.0, recall=(0.0, 99.0)))
    assert len(result.recalled_turns) + len(result.present_turns) == len(found)
    assert result.ledger.recomputed == 0
