"""What `dayshift doctor` looks for on a machine with a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from dayshift.experiments.commands.doctor import missing_to_launch_kernels


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it but what a test puts there; no CC."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def test_a_missing_compiler_is_named(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (missing_to_launch_kernels() or "").startswith("a C compiler (gcc or clang")
    monkeypatch.setenv("CC", "tcc")
    assert "compiler" not in (missing_to_launch_kernels() or "")


def test_missing_headers_are_named(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (programs / "gcc").touch(mode=0o755)
    include = programs / "include"
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(include)})
    assert missing_to_launch_kernels() == (
        f"Python's headers ({include}/Python.h, often in a package python3-dev)"
    )
    include.mkdir()
    (include / "Python.h").touch()
    assert missing_to_launch_kernels() is None
