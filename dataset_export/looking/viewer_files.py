"""What the files for other viewers have in common: names, and a file that is there whole or not at all."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dayshift.dataset_export.errors import os_errors_explained
from dayshift.dataset_export.looking.dataset import Episode
from dayshift.dataset_export.looking.encoded import EncodedPart
from dayshift.types import DayshiftError


def entity(feature: str) -> str:
    """A feature's name as a path: "observation.images.wrist" is observation/images/wrist."""
    return feature.replace(".", "/")


def time_ns(frame_index: int, fps: int) -> int:
    """A frame's time in the episode, in whole nanoseconds."""
    return frame_index * 10**9 // fps


def ending(episode: Episode) -> str:
    """How the attempt ended, in one line; "" where the dataset does not say."""
    facts = episode.entry.facts
    if not facts:
        return ""
    reason = facts.get("give_up_reason")
    return f"{facts['outcome']}; the step was given up ({reason})" if reason else str(facts["outcome"])


def not_copied(videos: Mapping[str, EncodedPart]) -> list[str]:
    """A line for each camera whose pictures are no copy of those in the dataset."""
    return [
        f"{camera}: {video.why_png}, so each picture was written as PNG, without loss"
        for camera, video in videos.items()
        if video.why_png
    ]


def require(module: str, package: str, option: str) -> None:
    """Raises DayshiftError that says what to install when a viewer's library is not there."""
    if importlib.util.find_spec(module) is None:
        raise DayshiftError(f"{option} needs {package}, which is not installed: pip install 'dayshift[show]'")


@contextmanager
def new_file(to: Path) -> Iterator[Path]:
    """A path to write to that becomes `to` at the end; nothing is left after an error.

    Raises DayshiftError when `to` exists already or cannot be written.
    """
    if to.exists():
        raise DayshiftError(f"{to} exists already: choose another name")
    part = to.with_name(f".{to.name}.part")
    with os_errors_explained(to):
        part.touch()
        try:
            yield part
            part.replace(to)
        finally:
            part.unlink(missing_ok=True)
