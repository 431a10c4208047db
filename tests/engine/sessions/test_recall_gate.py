"""Recall as KV is measured on the model's own weights, and replaced or refused where it garbles."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import (
    GenerateResult,
    InvalidRequestError,
    KVRecall,
    RecallMode,
    SessionConfig,
)
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.sessions import codecs
from dayshift.engine.sessions.codecs.plain import RawCodec
from dayshift.engine.sessions.recall_probe import measure_recall_gap
from dayshift.engine.sessions.record_format import KVDims
from tests.engine.driving import take_turn, turn_request

PLANNER = Path(__file__).parents[3] / "planner" / "weights"


def open_engine(folder: Path, **options: Any) -> Engine:
    return Engine(
        EngineConfig(model=str(folder), device="cpu", num_kv_blocks=64, window=256, restore="read", **options)
    )


def fill(engine: Engine) -> str:
    """A session whose first turns have left its window."""
    session_id = engine.open_session(SessionConfig(system="Lead.", recall_budget=100)).session_id
    for at in range(10):
        take_turn(engine, turn_request(session_id, f"Step {at}: lift bowl {at}.", at=float(at)))
    return session_id


def ask(
    engine: Engine, session_id: str, at: float = 50.0, mode: RecallMode = RecallMode.KV
) -> GenerateResult:
    request = turn_request(session_id, "What was lifted first?", at=at, recall=(0.0, 2.0), mode=mode)
    return take_turn(engine, request)


def test_the_first_recall_measures_and_the_store_keeps_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    engine = open_engine(tiny_model_dir, store_dir=tmp_path)
    session_id = fill(engine)
    assert engine.session(session_id).kv_recall is KVRecall.UNTRIED
    assert engine.stats().recall_kl == 0
    assert ask(engine, session_id).ledger.recalled > 0
    assert engine.session(session_id).kv_recall is KVRecall.ALLOWED
    stats = engine.stats()
    assert 0 < stats.recall_kl < 0.25
    assert (stats.is_kv_recall_allowed, stats.num_recalls_switched) == (1, 0)
    engine.check_invariants()
    engine.close()

    (kept,) = tmp_path.glob("recall-*.json")
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"kl_kv": 3.0}))
    engine = open_engine(tiny_model_dir, store_dir=tmp_path)
    assert ask(engine, session_id, at=60.0).ledger.recalled == 0
    assert engine.stats().recall_kl == 3.0
    engine.close()

    kept.write_text("torn")
    engine = open_engine(tiny_model_dir, store_dir=tmp_path)
    ask(engine, session_id, at=70.0)
    assert engine.stats().recall_kl == stats.recall_kl
    engine.close()


def test_a_model_that_garbles_recalls_as_text(tiny_model_dir: Path) -> None:
    engine = open_engine(tiny_model_dir, recall_max_kl=1e-9)
    switched, text = fill(engine), fill(engine)
    got, expected = ask(engine, switched), ask(engine, text, mode=RecallMode.TEXT)
    assert got.token_ids == expected.token_ids
    assert got.recalled_turns == (0, 1)
    assert got.ledger.recalled == 0
    assert got.ledger.recomputed == expected.ledger.recomputed > 0
    infos = engine.session(switched), engine.session(text)
    assert [(info.kv_recall, info.num_recalls_switched) for info in infos] == [
        (KVRecall.AS_TEXT, 1),
        (KVRecall.AS_TEXT, 0),
    ]
    assert (engine.stats().is_kv_recall_allowed, engine.stats().num_recalls_switched) == (0, 1)

    # What stands there as text is not read back as KV after parking either.
    for session_id in (switched, text):
        engine.park_session(session_id)
    again = ask(engine, switched, at=60.0), ask(engine, text, at=60.0, mode=RecallMode.TEXT)
    assert again[0].token_ids == again[1].token_ids
    assert again[0].ledger.recomputed > 0
    engine.check_invariants()
    engine.close()


def test_or_it_refuses(tiny_model_dir: Path) -> None:
    engine = open_engine(tiny_model_dir, recall_max_kl=1e-9, recall_gate="refuse")
    session_id = fill(engine)
    with pytest.raises(InvalidRequestError, match=r"recall_mode kv is refused: .* ask with recall_mode text"):
        ask(engine, session_id)
    info = engine.session(session_id)
    assert (info.kv_recall, info.is_busy, len(info.turns)) == (KVRecall.REFUSED, False, 10)
    assert ask(engine, session_id, mode=RecallMode.TEXT).recalled_turns == (0, 1)
    engine.check_invariants()
    engine.close()


@pytest.mark.parametrize("options", [{"recall_gate": "off"}, {"load_format": "dummy"}])
def test_without_a_gate_nothing_is_measured(options: dict[str, Any], tiny_model_dir: Path) -> None:
    engine = open_engine(tiny_model_dir, recall_max_kl=0.0, **options)
    session_id = fill(engine)
    assert ask(engine, session_id).ledger.recalled > 0
    assert engine.stats().recall_kl == 0
    assert engine.session(session_id).kv_recall is KVRecall.ALLOWED
    engine.close()


class GarblingCodec(RawCodec):
    """Gives back values that do not belong to their keys."""

    def decode(self, payload: torch.Tensor, dims: KVDims, dtype: torch.dtype, out: torch.Tensor) -> None:
        super().decode(payload, dims, dtype, out)
        out[1] = -out[1].flip(1)


def test_values_that_do_not_belong_to_their_keys_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(PLANNER)

    assert isinstance(engine.runner, ModelRunner)
    measure = partial(measure_recall_gap, engine.runner, engine.tokenizer, "raw")

    right = measure()
    assert right.kl_kv < 0.25 < right.kl_none
    monkeypatch.setitem(codecs.CODECS, "raw", GarblingCodec())
    assert measure().kl_kv > 0.25
    engine.close()
