"""One compiled scene for all tests of this folder; every test resets it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dayshift.sim.libero_env import LiberoEnv


@pytest.fixture(scope="session")
def env() -> Iterator[LiberoEnv]:
    env = LiberoEnv()
    yield env
    env.close()
