"""The bench of restores: what it forces is what happens, and it leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.bench.restore import compare_restores
from dayshift.engine.sessions.kv_tiers import Tier
from dayshift.engine.sessions.restore_cost import ReadTime
from dayshift.types import DayshiftError


@pytest.mark.parametrize(("read_s", "choice"), [(0.0, "read"), (100.0, "compute")])
def test_a_row_for_each_size_and_tier(
    read_s: float, choice: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    engine = Engine(EngineConfig(model=str(tiny_model_dir), num_kv_blocks=64, window=512, store_dir=tmp_path))
    assert engine.restore_cost is not None
    engine.restore_cost = replace(engine.restore_cost, read=dict.fromkeys(Tier, ReadTime(read_s, 0.0)))
    rows = list(compare_restores(engine, (64, 128)))
    assert [(row.num_tokens, row.tier) for row in rows] == [
        (size, tier) for size in (64, 128) for tier in Tier
    ]
    assert {row.choice for row in rows} == {choice}
    assert all(min(row.read_ms, row.compute_ms, row.chosen_ms) > 0 for row in rows)
    engine.check_invariants()
    assert engine.pool.num_free == 64
    assert engine.sessions() == []
    engine.close()


def test_an_engine_that_did_not_measure_is_refused(tiny_model_dir: Path) -> None:
    engine = Engine(EngineConfig(model=str(tiny_model_dir), num_kv_blocks=64, window=512, restore="read"))
    with pytest.raises(DayshiftError, match="cheapest"):
        next(compare_restores(engine, (64,)))
    engine.close()
