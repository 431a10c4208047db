"""What tests share: one small checkpoint, written by lerobot, and a process in which Triton interprets."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from dayshift.policy.smolvla.parity_cases import ParityCase, Reference, write_checkpoint
from dayshift.policy.smolvla.policy import SmolVLAPolicy

# Two cameras of the robot's, one empty camera, tokens around images: the prefix with the most parts.
CASE = ParityCase(
    name="two cameras and an empty one",
    cameras={"image": (64, 64), "image2": (48, 64)},
    policy={"empty_cameras": 1, "add_image_special_tokens": True},
)


@pytest.fixture(scope="session")
def case() -> ParityCase:
    return CASE


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, CASE)
    return folder


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return write_checkpoint(tmp_path_factory.mktemp("reference"), CASE)


@pytest.fixture(scope="session")
def policy(checkpoint: Path) -> SmolVLAPolicy:
    return SmolVLAPolicy.load(checkpoint)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process whose Triton interprets; tensors are shared with it. It and its environment end with the
    module's tests, because others look for processes that were left and compile kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
            yield executor
