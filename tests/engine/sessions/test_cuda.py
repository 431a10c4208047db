"""Sessions on a CUDA device: what is parked and restored goes on as if it had never been parked."""

from __future__ import annotations

from pathlib import Path

import pytest

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import SessionConfig
from tests.engine.driving import take_turn, turn_request

pytestmark = pytest.mark.gpu


def replies(
    folder: Path, store_dir: Path | None, host_kv_bytes: int, *, parks: bool
) -> list[tuple[int, ...]]:
    """Greedy replies of a session whose turns leave its window and are recalled, parked between the turns."""
    engine = Engine(
        EngineConfig(
            model=str(folder),
            device="cuda",
            num_kv_blocks=128,
            window=256,
            restore="read",
            host_kv_bytes=host_kv_bytes,
            store_dir=store_dir,
        )
    )
    session_id = engine.open_session(SessionConfig(system="Lead.", recall_budget=100)).session_id
    found = []
    for at in range(16):
        recall = (0.0, 2.0) if at in (12, 15) else None
        request = turn_request(session_id, f"Step {at}: lift bowl {at}.", at=float(at), recall=recall)
        result = take_turn(engine, request)
        assert result.ledger.recomputed == 0
        assert (result.ledger.restored > 0) == (parks and at > 0)
        found.append(result.token_ids)
        if parks:
            engine.park_session(session_id)
    assert engine.pool.num_free == 128 or not parks
    engine.check_invariants()
    engine.close()
    return found


@pytest.mark.parametrize("host_kv_bytes", [1 << 24, 0])
def test_parked_and_restored_equals_never_parked(
    tiny_model_dir: Path, tmp_path: Path, host_kv_bytes: int
) -> None:
    expected = replies(tiny_model_dir, None, 1 << 24, parks=False)
    assert replies(tiny_model_dir, tmp_path, host_kv_bytes, parks=True) == expected
