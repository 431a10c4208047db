"""docs/models.md says what the code has, and every architecture in it is tested."""

from __future__ import annotations

from pathlib import Path

from dayshift.engine.models.gguf_config import MODEL_TYPES
from dayshift.engine.models.hugging_face_config import SUPPORTED
from dayshift.engine.models.table import SEEN_ON_GPU, with_tables
from tests.engine.test_decoder import MODELS


def test_the_page_has_the_codes_tables() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert with_tables(page) == page, "run: python -m dayshift.engine.models.table docs/models.md"


def test_every_architecture_is_checked_against_transformers() -> None:
    tested = {fields.get("model_type", "qwen3") for fields in MODELS.values()}
    assert tested == set(SUPPORTED) - {"gemma3"}  # the same text model under other names
    assert set(MODEL_TYPES.values()) == tested
    assert set(SEEN_ON_GPU) <= set(SUPPORTED)
