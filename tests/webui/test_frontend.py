"""The page's own unit tests, in TypeScript, and its build."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dayshift.webui import build


def test_of_several_builders_one_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    frontend, static = tmp_path / "frontend", tmp_path / "static"
    frontend.mkdir()
    static.mkdir()
    package = {"name": "page", "version": "1.0.0", "scripts": {"build": "echo built >> ../static/page"}}
    (frontend / "package.json").write_text(json.dumps(package))
    lock = {"name": "page", "version": "1.0.0", "lockfileVersion": 3, "packages": {}}
    (frontend / "package-lock.json").write_text(json.dumps(lock))
    monkeypatch.setattr(build, "FRONTEND", frontend)
    monkeypatch.setattr(build, "STATIC", static)
    with ThreadPoolExecutor(3) as threads:
        assert sorted(threads.map(lambda _: build.build_page(), range(3))) == [False, False, True]
    assert (static / "page").read_text() == "built\n"


def test_the_pages_own_tests_pass():
    build.build_page()
    if not (build.FRONTEND / "node_modules").is_dir():  # built, and its tools removed since
        build.run_npm("ci", "--no-audit", "--no-fund")
    build.run_npm("test")
