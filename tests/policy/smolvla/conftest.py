"""What tests share: one small checkpoint, written by lerobot."""

from __future__ import annotations

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
