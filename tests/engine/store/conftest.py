from __future__ import annotations

from pathlib import Path

import pytest

from dayshift.engine.sessions.store import SessionStore
from tests.engine.store.samples import IDENTITY


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "sessions", IDENTITY)
