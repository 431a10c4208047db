"""One compiled scene for all tests of this folder that need the simulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dayshift.sim.libero_env import LiberoEnv


@pytest.fixture(scope="session")
def env() -> Iterator[LiberoEnv]:
    env = LiberoEnv()
    yield env
    env.close()
