"""What is parked and restored goes on as if it had never been parked, in bfloat16, on a CPU and on CUDA.

Three promises, by what may change the order of sums. Drafts are verified where that was measured to pay, so
by default two runs take different steps, which other kernels compute with other roundings.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import SamplingParams, SessionConfig
from dayshift.engine.sessions import context_builder
from tests.engine.driving import take_turn, turn_request

on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
by_tier = pytest.mark.parametrize("host_kv_bytes", [1 << 24, 0], ids=["host memory", "disk"])
NUM_TURNS, NUM_REPLY_TOKENS, NUM_BLOCKS = 16, 8, 128
HOST_BYTES = 1 << 24

Reply = tuple[tuple[int, float], ...]  # tokens and their log probabilities


@pytest.fixture(autouse=True)
def needs(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["device"] == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def replies(
    folder: Path, device: str, *, parks_in: Path | None = None, is_forced: bool = False, **options: Any
) -> list[Reply]:
    """Replies of a session whose turns leave its window and are recalled, parked between the turns if there
    is a store. Greedy, or forced: each turn repeats a token of its own."""
    config = EngineConfig(
        model=str(folder),
        device="cuda" if device == "cuda" else "cpu",
        num_kv_blocks=NUM_BLOCKS,
        window=256,
        restore="read",
        store_dir=parks_in,
        **{"dtype": "bfloat16", "host_kv_bytes": HOST_BYTES} | options,
    )
    engine = Engine(config)
    session_id = engine.open_session(SessionConfig(system="Lead.", recall_budget=100)).session_id
    found: list[Reply] = []
    for at in range(NUM_TURNS):
        recall = (0.0, 2.0) if at in (12, 15) else None
        request = turn_request(session_id, f"Step {at}: lift bowl {at}.", at=float(at), recall=recall)
        sampling = SamplingParams(
            max_tokens=NUM_REPLY_TOKENS,
            ignore_eos=True,
            logprobs=0,
            logit_bias=((100 + at, 100.0),) if is_forced else (),
        )
        result = take_turn(engine, replace(request, sampling=sampling))
        assert result.ledger.recomputed == 0
        assert (result.ledger.restored > 0) == (parks_in is not None and at > 0)
        assert not is_forced or set(result.token_ids) == {100 + at}
        found.append(tuple((entry.token_id, entry.logprob) for entry in result.logprobs))
        if parks_in is not None:
            engine.park_session(session_id)
    assert engine.pool.num_free == NUM_BLOCKS or parks_in is None
    engine.check_invariants()
    engine.close()
    return found


def largest_difference(some: list[Reply], others: list[Reply]) -> float:
    """Of the log probabilities of the same tokens."""
    pairs = [pair for reply in zip(some, others, strict=True) for pair in zip(*reply, strict=True)]
    assert all(a[0] == b[0] for a, b in pairs)
    return max(abs(a[1] - b[1]) for a, b in pairs)


@on_each_device
@by_tier
def test_deterministic_replies_are_the_same(
    tiny_model_dir: Path, tmp_path: Path, device: str, host_kv_bytes: int
) -> None:
    """Token for token, and every bit of their log probabilities, whatever steps the clock chooses."""
    expected = replies(tiny_model_dir, device, deterministic=True)
    options = {"deterministic": True, "host_kv_bytes": host_kv_bytes}
    assert replies(tiny_model_dir, device, parks_in=tmp_path, **options) == expected


@on_each_device
@by_tier
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "layer by layer"])
def test_the_same_steps_have_the_same_bits(
    tiny_model_dir: Path,
    tmp_path: Path,
    device: str,
    host_kv_bytes: int,
    cuda_graphs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without drafts nothing is chosen by the clock, and no kernel's sum depends on who comes first. Without
    graphs KV comes back in groups of layers, under the step that reads it."""
    monkeypatch.setattr(context_builder, "_GROUP_BYTES", 1)
    options: dict[str, Any] = {"speculation": "off", "cuda_graphs": cuda_graphs}
    expected = replies(tiny_model_dir, device, **options)
    assert replies(tiny_model_dir, device, **options) == expected
    options["host_kv_bytes"] = host_kv_bytes
    assert replies(tiny_model_dir, device, parks_in=tmp_path, **options) == expected


@on_each_device
@by_tier
def test_other_steps_differ_by_rounding(
    tiny_model_dir: Path, tmp_path: Path, device: str, host_kv_bytes: int
) -> None:
    """With all defaults. How far rounding to bfloat16 takes this model's log probabilities from those in
    float32 is measured here; two runs of which each is as far off at most are twice as far from each other
    at most. Keys of another place or turn are farther off by a multiple, which the last line shows."""
    exact, rounded = (
        replies(tiny_model_dir, device, is_forced=True, dtype=dtype) for dtype in ("float32", "bfloat16")
    )
    bound = 2 * largest_difference(exact, rounded)
    parked = replies(tiny_model_dir, device, parks_in=tmp_path, is_forced=True, host_kv_bytes=host_kv_bytes)
    assert largest_difference(parked, rounded) <= bound
