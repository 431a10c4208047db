"""A session that never ends: positions, memory and work per turn stay bounded, and keys do not drift."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import SessionConfig
from tests.engine.driving import take_turn, turn_request
from tests.engine.sessions.test_session_machine import first_layer_keys

WINDOW = 256


def run_endless(folder: Path, store_dir: Path, num_tokens: int) -> None:
    engine = Engine(
        EngineConfig(
            model=str(folder),
            device="cpu",
            num_kv_blocks=64,
            window=WINDOW,
            host_kv_bytes=1 << 18,
            restore="read",
            store_dir=store_dir,
        )
    )
    session_id = engine.open_session(SessionConfig(system="Lead.", recall_budget=100)).session_id
    session = engine.session_manager.get(session_id)
    num_past = at = 0
    while num_past < num_tokens:
        recall = (float(at - 30), float(at - 28)) if at % 10 == 9 else None
        request = turn_request(
            session_id, f"Step {at}: put the bowl on the plate.", at=float(at), recall=recall
        )
        result = take_turn(engine, request)
        ledger = result.ledger
        # Whatever lies behind, a turn computes its own tokens and nothing else.
        assert ledger.recomputed == 0
        assert ledger.computed <= (60 if at else 120)
        assert result.num_prompt_tokens + ledger.generated <= WINDOW + 100
        assert len(session.context.token_ids) <= WINDOW + 100
        num_past += ledger.computed + ledger.generated
        at += 1
    context = session.context
    keys = engine.pool.read(context, 0, context.num_computed)[0, 0]
    expected = first_layer_keys(engine, context.token_ids[: context.num_computed])
    torch.testing.assert_close(keys, expected)
    engine.check_invariants()
    first = take_turn(engine, turn_request(session_id, "How did it begin?", at=1e6, recall=(0.0, 2.0)))
    assert first.recalled_turns == (0, 1)
    assert first.ledger.recomputed == 0
    engine.close()


def test_an_endless_session_stays_bounded(tiny_model_dir: Path, tmp_path: Path) -> None:
    run_endless(tiny_model_dir, tmp_path, 4_000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_thousand_tokens_stay_bounded(tiny_model_dir: Path, tmp_path: Path) -> None:
    run_endless(tiny_model_dir, tmp_path, 200_000)
