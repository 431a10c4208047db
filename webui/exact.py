"""Pictures that were not recorded, rendered from the recorded simulator state in a process of its own.

The picture is the one that would have been recorded, pixel by pixel (see `sim.render`).
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dayshift.dataset_export import attempt_files as files
from dayshift.types import DayshiftError
from dayshift.webui.pictures import Moment, Picture, encode_jpeg

if TYPE_CHECKING:
    from dayshift.sim.render import FrameRenderer

logger = logging.getLogger(__name__)


class RenderingError(DayshiftError):
    """A recorded state cannot be shown: another simulator recorded it, or the renderer crashed."""


class ExactRenderer:
    """Renders single control steps. The process starts when first needed; close it after use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed: set[tuple[Path, str]] = set()
        self._pool: ProcessPoolExecutor | None = None

    def submit(self, run_dir: Path, moment: Moment) -> Future[list[Picture]]:
        """Both cameras at exactly the moment's control step. Seconds for the first of a scene, then 0.1 s.

        The future raises RenderingError for a state that this simulator cannot show, or when the renderer
        crashed; the next call starts a new one.
        """
        folder = files.attempt_folder(run_dir, moment.attempt_id)
        with self._lock:
            if self._pool is None:
                self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
            try:
                return self._pool.submit(_render, folder, moment.index)
            except BrokenProcessPool:  # it crashed after its last picture
                self._pool = None
        return self.submit(run_dir, moment)

    async def render(self, run_dir: Path, moment: Moment) -> list[Picture]:
        """As `submit`, awaited. Raises RenderingError, for the same attempt again without trying."""
        attempt = (run_dir, moment.attempt_id)
        if attempt in self._failed:
            raise RenderingError(f"{moment.attempt_id} cannot be rendered here")
        try:
            return await asyncio.wrap_future(self.submit(run_dir, moment))
        except (RenderingError, BrokenProcessPool) as error:
            self._failed.add(attempt)
            logger.warning("%s: %s", moment.attempt_id, error)
            raise RenderingError(str(error)) from error

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=True, cancel_futures=True)
                self._pool = None


def _render(folder: Path, index: int) -> list[Picture]:
    """Runs in the renderer's process."""
    try:
        renderer, states = _load(folder)
        images = renderer.render(index, states[index])
    except Exception as error:  # noqa: BLE001  MuJoCo, LIBERO, OpenGL: whatever they raise is told
        raise RenderingError(f"cannot be rendered here ({type(error).__name__}: {error})") from None
    return [Picture(camera=camera, index=index, jpeg=encode_jpeg(image)) for camera, image in images.items()]


@lru_cache(maxsize=1)
def _load(folder: Path) -> tuple[FrameRenderer, NDArray[np.float64]]:
    """The renderer with an attempt loaded, and the attempt's states."""
    start = files.read_start(folder / files.START)
    renderer = _renderer()
    renderer.load(start.spec, start.start)
    return renderer, files.read_frames(folder / files.FRAMES).sim_state


@lru_cache(maxsize=1)
def _renderer() -> FrameRenderer:
    from dayshift.sim.render import FrameRenderer

    return FrameRenderer()
