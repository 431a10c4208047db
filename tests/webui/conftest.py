from __future__ import annotations

from pathlib import Path

import pytest

from dayshift.webui.run_index import RunIndex
from tests.webui.made_runs import MadeRun


@pytest.fixture(scope="session")
def made_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two robots, one shift of four steps each and its review; the first attempts have pictures."""
    return MadeRun(tmp_path_factory.mktemp("runs") / "made", operation_s=20, num_recorded=3).build()


@pytest.fixture
def index(made_run: Path):
    index = RunIndex(made_run)
    yield index
    index.close()
