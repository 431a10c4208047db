"""Running lerobot in a process of its own: its imports, its caches and its decoders stay out of ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import av
import msgspec

from dayshift.dataset_export.verify import Problem
from dayshift.types import DayshiftError

_LIBRARY = re.compile(r"(lib(?:av|sw)[a-z]+)-[0-9a-f]+\.so\.(\d+)")


class LeRobotReport(msgspec.Struct):
    """What `verify_lerobot` found."""

    num_items: int  # items that lerobot's two datasets gave and that were compared
    problems: list[Problem]
    notes: list[str]  # what could not be checked, and why


class WriterSpeed(msgspec.Struct, kw_only=True):
    """How fast a writer turned recorded attempts into a dataset; see `writer_speed`."""

    writer: str  # "ours", or lerobot's mode
    image_size: int
    num_episodes: int
    num_frames: int
    frame_pairs_per_s: float


def measure_writers(run_dir: Path, image_sizes: Sequence[int], max_frames: int) -> list[WriterSpeed]:
    """Time our writer beside lerobot's on a run's attempts, at each size of the pictures."""
    sizes = ",".join(map(str, image_sizes))
    done = run_lerobot(["-m", "dayshift.dataset_export.writer_speed", str(max_frames), sizes, str(run_dir)])
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[WriterSpeed])


def verify_with_lerobot(datasets: Sequence[Path]) -> list[LeRobotReport]:
    """Load datasets with `LeRobotDataset` and `StreamingLeRobotDataset` and compare what they give.

    Raises DayshiftError when lerobot itself fails, with its last line.
    """
    done = run_lerobot(["-m", "dayshift.dataset_export.verify_lerobot", *map(str, datasets)])
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[LeRobotReport])


def run_lerobot(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run Python with `arguments`, offline, with empty caches, so that torchcodec finds FFmpeg."""
    with tempfile.TemporaryDirectory() as cache, ffmpeg_libraries() as libraries:
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": cache,
            "LD_LIBRARY_PATH": os.pathsep.join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]),
        }
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise DayshiftError(f"lerobot failed: {lines[-1]}")
    return done


@contextmanager
def ffmpeg_libraries() -> Iterator[list[str]]:
    """Folders for LD_LIBRARY_PATH in which torchcodec finds the FFmpeg libraries that PyAV ships.

    They have hashed names there; torchcodec asks for the plain ones.
    """
    shipped = Path(av.__file__).parent.with_name("av.libs")
    with tempfile.TemporaryDirectory() as plain:
        for library in shipped.glob("lib*"):
            if match := _LIBRARY.match(library.name):
                (Path(plain) / f"{match[1]}.so.{match[2]}").symlink_to(library)
        yield [plain, str(shipped)]
