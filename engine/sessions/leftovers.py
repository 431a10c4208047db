"""What engines that were killed leave in a store's folder: files that had no session's name yet."""

from __future__ import annotations

import fcntl
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

UNNAMED_SUFFIX = ".new"
MEASUREMENT_PREFIX = ".measurement-"
PROBE_PREFIX = ".direct-"
_AGE_S = 600.0  # younger ones may be another engine's that is at work


def remove_leftovers(root: Path) -> None:
    """Remove what nobody has written to for a while and nobody holds. Raises OSError."""
    for path in list(_leftovers(root)):
        logger.warning("%s: removed; an engine was killed while it wrote it", path)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _leftovers(root: Path) -> Iterator[Path]:
    for pattern in (f"*.session.*{UNNAMED_SUFFIX}", f"{MEASUREMENT_PREFIX}*", f"{PROBE_PREFIX}*"):
        for path in root.glob(pattern):
            try:
                is_old = time.time() - path.stat().st_mtime > _AGE_S
                if is_old and not _is_held(path):
                    yield path
            except FileNotFoundError:  # another engine has ended its work
                continue


def _is_held(path: Path) -> bool:
    if path.is_dir():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
