"""docs/models.md says what the code has and what was seen, and every architecture in it is tested."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dayshift.engine.models.gguf_config import MODEL_TYPES
from dayshift.engine.models.hugging_face_config import SUPPORTED
from dayshift.engine.models.seen_on_gpu import SeenModel, SeenRun, put_run, read_runs
from dayshift.engine.models.table import tables, with_tables
from dayshift.types import DayshiftError
from tests.engine.test_decoder import MODELS

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "seen_on_gpu.json"
RUN = SeenRun(command="pytest -m gpu", machine="H200", commit="abc", date="2026-11-30", num_passed=2)


def test_the_page_has_the_tables_of_code_and_record() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    command = "python -m dayshift.engine.models.table docs/models.md benchmarks/seen_on_gpu.json"
    assert with_tables(page, read_runs(RECORD)) == page, f"run: {command}"


def test_every_architecture_is_checked_against_transformers() -> None:
    tested = {fields.get("model_type", "qwen3") for fields in MODELS.values()}
    assert tested == set(SUPPORTED) - {"gemma3"}  # the same text model under other names
    assert set(MODEL_TYPES.values()) == tested


def test_what_was_not_seen_is_not_said_to_be() -> None:
    assert tables([]).count("not yet") == len(SUPPORTED) + 1
    model = SeenModel(model_type="qwen2", weights="bfloat16", seen_in=("tests/engine/test_x.py::test_y",))
    (row,) = [line for line in tables([RUN.with_models([model])]).splitlines() if "| `qwen2` | qwen2" in line]
    assert row.endswith("| our decoder | H200: bfloat16 |")
    assert "| `qwen2` | bfloat16 | our decoder | H200 | test_x: test_y |" in tables(
        [RUN.with_models([model])]
    )


def test_a_record_keeps_the_newest_run_of_a_command_on_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "seen.json"
    newer, elsewhere = (
        msgspec.structs.replace(RUN, commit="def"),
        msgspec.structs.replace(RUN, machine="RTX 4090"),
    )
    for run in (RUN, elsewhere, newer):
        put_run(path, run)
    assert read_runs(path) == (elsewhere, newer)
    path.write_text("{}")
    with pytest.raises(DayshiftError, match=r"seen\.json is no record of GPU runs"):
        read_runs(path)


def test_a_model_seen_twice_names_both_places() -> None:
    first, second = (SeenModel(model_type="llama", weights="float32", seen_in=(name,)) for name in "ab")
    assert RUN.with_models([first]).with_models([second]).models == (
        SeenModel(model_type="llama", weights="float32", seen_in=("a", "b")),
    )
