"""Writes the tables of failures into docs/session-memory.md: `python -m tests.engine.failure_table`."""

from __future__ import annotations

import ast
import tomllib
from itertools import groupby
from pathlib import Path

FOLDER = Path(__file__).parent
DOCUMENT = FOLDER.parents[1] / "docs" / "session-memory.md"
BEGIN, END = "<!-- failures: begin -->\n", "<!-- failures: end -->\n"


def failures() -> list[dict[str, str]]:
    """The entries of failures.toml: area, kind, test, outcome; those of an area stand together."""
    return tomllib.loads((FOLDER / "failures.toml").read_text())["failure"]


def table() -> str:
    """A table for each area, in Markdown."""
    parts = []
    for area, entries in groupby(failures(), lambda failure: failure["area"]):
        rows = [f"| {area} | test in tests/engine | what happens here |", "|---|---|---|"]
        rows += [f"| {f['kind']} | `{f['test']}` | {f['outcome']} |" for f in entries]
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def missing_tests() -> list[str]:
    """Entries whose test does not exist."""
    return [failure["test"] for failure in failures() if not _exists(failure["test"])]


def with_table(document: str) -> str:
    """The document with the tables between its two marks."""
    before, rest = document.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def _exists(test: str) -> bool:
    path, name = test.split("::")
    file = FOLDER / path
    if not file.is_file():
        return False
    nodes = ast.walk(ast.parse(file.read_text()))
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name for node in nodes
    )


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
