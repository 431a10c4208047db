"""A real server, the small planner and a small SmolVLA in one core; venvs for other people's clients."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dayshift.engine.action_api import ActionBody, CameraImage
from dayshift.engine.client import DayshiftClient
from dayshift.engine.config import EngineConfig
from dayshift.engine.server.run import ServerOptions, running_server
from dayshift.experiments.planners import default_model_folder
from dayshift.policy.serving import smolvla_source
from dayshift.policy.smolvla.parity_cases import ParityCase, write_checkpoint

MakeVenv = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LIBERO's two cameras, state of 8, action of 7, chunks of 10 of which 1 is used."""
    folder = tmp_path_factory.mktemp("policy")
    write_checkpoint(folder, ParityCase(name="served"))
    return folder


@pytest.fixture(scope="session")
def engine_config(checkpoint: Path) -> EngineConfig:
    return EngineConfig(
        model=str(default_model_folder()),
        device="cpu",
        kv_cache_bytes=32 << 20,
        policies=(smolvla_source("arm", checkpoint, device="cpu"),),
    )


@pytest.fixture(scope="session")
def server_url(engine_config: EngineConfig) -> Iterator[str]:
    with running_server(engine_config, ServerOptions(port=0, in_process=True)) as url:
        yield url


@pytest.fixture(scope="session")
def client(server_url: str) -> Iterator[DayshiftClient]:
    with DayshiftClient(server_url, timeout_s=60) as client:
        yield client


@pytest.fixture
def body() -> ActionBody:
    rng = np.random.default_rng(0)
    return ActionBody(
        images={name: random_image(rng) for name in ("image", "image2")},
        state=tuple(rng.random(8).tolist()),
        instruction="turn on the stove",
        seed=7,
    )


def random_image(rng: np.random.Generator, height: int = 64, width: int = 64) -> CameraImage:
    return CameraImage(height=height, width=width, data=rng.bytes(height * width * 3))


@pytest.fixture(scope="session")
def make_venv(pytestconfig: pytest.Config) -> MakeVenv:
    """The Python of a venv with these packages; kept between test runs. Skips without a package index."""

    def make(*requirements: str) -> Path:
        assert pytestconfig.cache is not None
        folder = pytestconfig.cache.mkdir(f"venv-{requirements[0]}")
        python, is_complete = folder / "bin" / "python", folder / "complete"
        if not is_complete.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            install = [str(python), "-m", "pip", "install", "--quiet", *requirements]
            done = subprocess.run(install, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{requirements[0]} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
            is_complete.touch()
        return python

    return make
