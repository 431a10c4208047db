"""`dayshift bench kernels` refuses what it cannot time, in one line."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dayshift.experiments.commands.bench import app
from dayshift.types import DayshiftError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "gpt-2"], "allowed: llama-3.1-8b, qwen3-30b-a3b, gguf"),
        (["--shape", "gguf", "--tune-products"], "allowed: llama-3.1-8b, qwen3-30b-a3b"),
    ],
)
def test_other_shapes_are_refused(options: list[str], message: str, tmp_path: Path):
    path = tmp_path / "tables.json"
    result = CliRunner().invoke(app, ["kernels", *options, *([str(path)] if len(options) == 3 else [])])
    assert isinstance(result.exception, DayshiftError)
    assert message in str(result.exception)
    assert not path.exists()
