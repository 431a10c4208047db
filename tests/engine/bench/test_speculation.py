"""The bench of drafts: the same replies, in fewer steps where there is something to draft from."""

from __future__ import annotations

from pathlib import Path

from dayshift.engine import EngineConfig
from dayshift.engine.bench.speculation import Conversation, compare_speculation

SCHEMA = {"type": "array", "items": {"enum": ["drawer"]}, "minItems": 6, "maxItems": 6}


def test_a_row_for_each_workload_and_size(tiny_model_dir: Path) -> None:
    turns = [(f"Result: failed, attempt {number}.", SCHEMA) for number in range(4)]
    conversation = Conversation(system="You lead a robot.", turns=turns)
    config = EngineConfig(model=str(tiny_model_dir), num_kv_blocks=128, window=512)
    rows = list(compare_speculation(config, [conversation], (1, 2), num_random_rounds=1))
    assert [(row.workload, row.num_at_once) for row in rows] == [
        ("conversations", 1),
        ("random text", 1),
        ("conversations", 2),
        ("random text", 2),
    ]
    for row in rows:
        assert row.num_other_replies == 0
        assert row.num_tokens > 0
        assert row.num_steps[1] <= row.num_steps[0]
        assert 0 <= row.num_accepted <= row.num_drafted
        assert min(row.seconds) > 0
    assert sum(row.num_accepted for row in rows) > 0
