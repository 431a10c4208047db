"""`dayshift bench kv` on a model with random weights."""

from __future__ import annotations

from pathlib import Path

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import Message
from dayshift.engine.bench.kv import Transcript, compare_codecs, compare_pool
from dayshift.engine.sessions.record_format import KV_CODECS


def turns(first: int, count: int) -> list[tuple[Message, ...]]:
    return [
        (Message("user", f"Step {i}: open drawer {i}."), Message("assistant", f"Drawer {i} is open."))
        for i in range(first, first + count)
    ]


def test_every_codec_has_a_row_and_raw_loses_nothing(tiny_model_dir: Path) -> None:
    engine = Engine(EngineConfig(model=str(tiny_model_dir), device="cpu", num_kv_blocks=128))
    transcript = Transcript(system="You lead.", past=turns(0, 6), future=turns(6, 2), num_tokens=20)
    quantized = Engine(
        EngineConfig(model=str(tiny_model_dir), device="cpu", num_kv_blocks=128, kv_cache_dtype="int8")
    )
    in_use = compare_pool(engine, quantized, transcript)
    quantized.close()
    rows = {row.codec: row for row in compare_codecs(engine, transcript)}
    assert engine.pool.num_free == 128
    assert engine.sessions() == []
    engine.close()
    assert tuple(rows) == KV_CODECS
    assert in_use.codec == "int8 in use"
    assert in_use.bytes_per_token == rows["int8"].bytes_per_token
    assert 0 < in_use.mean_kl < rows["rot4"].mean_kl
    assert (rows["raw"].mean_kl, rows["raw"].same_top_token, rows["raw"].ratio) == (0.0, 1.0, 0.5)
    assert rows["bf16"].ratio == 1.0
    assert 0 < rows["bf16"].mean_kl < rows["int8"].mean_kl < rows["rot4"].mean_kl < rows["residual"].mean_kl
    assert all(row.encode_gb_per_s > 0 and row.decode_gb_per_s > 0 for row in rows.values())
