import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dayshift.dataset_export.scheduling import scheduling_kept

# The tests' own helpers (recording_samples, ...) are plain modules beside them.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def scheduling() -> Iterator[None]:
    """lerobot's own encoder, too, takes no priority over the tests that follow."""
    with scheduling_kept():
        yield
