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
        (["--shape", "gguf", "--tune-products", "FILE"], "allowed: llama-3.1-8b, qwen3-30b-a3b"),
        (["--tune-products", "FILE", "--only", "norm"], "not with --only or --json"),
        (["--tune-products", "FILE", "--json"], "not with --only or --json"),
    ],
)
def test_what_cannot_be_timed_is_refused(options: list[str], message: str, tmp_path: Path):
    path = tmp_path / "tables.json"
    result = CliRunner().invoke(app, ["kernels", *(str(path) if o == "FILE" else o for o in options)])
    assert isinstance(result.exception, DayshiftError)
    assert message in str(result.exception)
    assert not path.exists()
