"""KV in use as int8 or fp8: values and their scales in the pool, quantised as they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import RecallMode, SamplingParams, SessionConfig
from dayshift.engine.kernels import reference
from dayshift.engine.quant.kv import POOL_DTYPES, SCALE_BYTES, read_blocks, read_slots, write_slots
from tests.engine.driving import generate, take_turn, turn_request

KINDS = ("int8", "fp8")
ON_GPU = pytest.param(True, True, marks=pytest.mark.gpu)  # a CPU takes one token after the other


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def make_engine(model: Path, device: Any, **fields: Any) -> Engine:
    # Drafts are verified where that was measured to pay: two engines would take different steps.
    settings: dict[str, Any] = {"num_kv_blocks": 128, "speculation": "off"} | fields
    return Engine(EngineConfig(model=str(model), device=device, restore="read", **settings))


@given(
    seed=st.integers(0, 2**30),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    num_tokens=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_values_come_back_within_half_a_step_and_have_the_same_bytes_again(
    seed: int, kind: str, dtype: torch.dtype, num_tokens: int
) -> None:
    x = torch.randn(num_tokens, 2, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)
    pool = torch.zeros(3, 4, 2, 16 + SCALE_BYTES, dtype=POOL_DTYPES[kind])
    slots = torch.randperm(12, generator=torch.Generator().manual_seed(seed))[:num_tokens]
    write_slots(x, pool, slots)
    values = read_slots(pool, slots)
    assert torch.equal(read_blocks(pool)[slots], values)
    largest = x.float().abs().amax(-1, keepdim=True)
    bound = largest / 127 * 0.502 if kind == "int8" else x.float().abs() / 16 + largest / 448 / 512 * 1.01
    assert ((values - x.float()).abs() <= bound).all()
    again = torch.zeros_like(pool)
    write_slots(values, again, slots)
    assert torch.equal(again, pool)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 5])
def test_attention_over_a_quantised_pool_is_attention_over_its_values(kind: str, window: int | None) -> None:
    torch.manual_seed(0)
    num_blocks, block_size, num_kv_heads, head_dim = 6, 4, 2, 16
    k, v = torch.randn(2, num_blocks * block_size, num_kv_heads, head_dim)
    pools = torch.zeros(
        2, num_blocks, block_size, num_kv_heads, head_dim + SCALE_BYTES, dtype=POOL_DTYPES[kind]
    )
    slots = torch.randperm(num_blocks * block_size)
    slots[3] = -1
    reference.store_kv(k, v, pools[0], pools[1], slots)
    plain = [read_blocks(pool).unflatten(0, (num_blocks, block_size)) for pool in pools]
    q = torch.randn(3, 4, head_dim)
    arguments: dict[str, Any] = {
        "block_tables": torch.tensor([[5, 0, 2], [1, 3, 0]], dtype=torch.int32),
        "seq_lens": torch.tensor([11, 6], dtype=torch.int32),
        "query_start": torch.tensor([0, 2, 3], dtype=torch.int32),
        "cos_sin": torch.randn(16, head_dim),
        "scale": 0.25,
        "window": window,
    }
    got = reference.paged_attention(q, pools[0], pools[1], **arguments)
    torch.testing.assert_close(got, reference.paged_attention(q, plain[0], plain[1], **arguments))


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_bytes_hold_twice_the_tokens_of_a_bfloat16_pool(
    kind: str, make_tiny_model: Any, device: str
) -> None:
    model = make_tiny_model(head_dim=128, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2)
    counts = {}
    for kv_cache_dtype in ("auto", kind):
        engine = make_engine(
            model,
            device,
            num_kv_blocks=None,
            kv_cache_bytes=1 << 20,
            dtype="bfloat16",
            kv_cache_dtype=kv_cache_dtype,
        )
        counts[kv_cache_dtype] = engine.pool.num_blocks
        assert engine.pool.kv.nbytes <= 1 << 20
        engine.close()
    assert counts[kind] / counts["auto"] > 1.96


@pytest.mark.parametrize("kind", KINDS)
def test_output_stays_near_that_of_the_plain_pool(kind: str, tiny_model_dir: Path, device: str) -> None:
    logprobs = {}
    for kv_cache_dtype in ("auto", kind):
        engine = make_engine(tiny_model_dir, device, kv_cache_dtype=kv_cache_dtype)
        result = generate(engine, range(3, 90), SamplingParams(max_tokens=1, logprobs=20, ignore_eos=True))
        logprobs[kv_cache_dtype] = dict(result.logprobs[0].top)
        engine.close()
    common = logprobs["auto"].keys() & logprobs[kind].keys()
    assert len(common) >= 15
    assert all(abs(logprobs["auto"][token] - logprobs[kind][token]) < 0.5 for token in common)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("in_store", "deterministic"), [(False, False), (True, False), ON_GPU])
def test_parked_and_restored_equals_never_parked(
    kind: str, in_store: bool, deterministic: bool, tiny_model_dir: Path, tmp_path: Path, device: str
) -> None:
    """At rest the pool's values are kept as they are, so nothing changes; compaction and recall included."""
    answers = []
    for parks in (False, True):
        fields: dict[str, Any] = {"kv_cache_dtype": kind, "deterministic": deterministic, "dtype": "bfloat16"}
        if in_store and parks:
            fields |= {"store_dir": tmp_path, "host_kv_bytes": 0}
        engine = make_engine(tiny_model_dir, device, **fields)
        session_id = engine.open_session(SessionConfig(system="You lead.", window=200)).session_id
        tokens = []
        for i in range(10):
            asked = (0.0, 2.0) if i == 9 else None
            request = turn_request(
                session_id, f"Open drawer {i}.", at=float(i), recall=asked, mode=RecallMode.KV
            )
            result = take_turn(engine, request)
            tokens.append(result.token_ids)
            assert result.recalled_turns == ((0, 1) if asked else ())
            if parks:
                assert result.ledger.recomputed == 0
                engine.park_session(session_id)
        assert engine.stats().num_refused_kv_pieces == 0
        engine.close()
        answers.append(tokens)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_answers_as_its_origin(kind: str, tiny_model_dir: Path, device: str) -> None:
    """Both write into the last block, which one of them gets a copy of, scales and all."""
    engine = make_engine(tiny_model_dir, device, kv_cache_dtype=kind)
    origin = engine.open_session(SessionConfig(system="You lead.", window=200)).session_id
    for i in range(3):
        take_turn(engine, turn_request(origin, f"Open drawer {i}.", at=float(i)))
    fork = engine.fork_session(origin).session_id
    answers = [take_turn(engine, turn_request(session, "Which one?", at=9.0)) for session in (origin, fork)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[1].ledger.recomputed == 0
    engine.close()
