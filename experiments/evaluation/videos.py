"""Films of episodes, rendered from their states after the fact, in a process of their own.

So an evaluation renders for the policy only, and no OpenGL context shares a process with anything else.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dayshift.processes import ctrl_c_blocked
from dayshift.sim.types import CONTROL_HZ, RolloutSpec, RolloutStart
from dayshift.types import DayshiftError

_STEPS_PER_PICTURE = 4


class FilmMaker:
    """Renders in the background. Use as a context manager: leaving it waits for the films."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        with ctrl_c_blocked():
            self._pool = ProcessPoolExecutor(1, mp_context=context)
        self._films: list[tuple[Path, Future[None]]] = []

    def film(
        self, path: Path, spec: RolloutSpec, start: RolloutStart, states: list[NDArray[np.float64]]
    ) -> None:
        """Have both cameras of an episode filmed, side by side, as people look at them."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with ctrl_c_blocked():  # the first one starts the process
            film = self._pool.submit(_film, path, spec, start, states[::_STEPS_PER_PICTURE])
        self._films.append((path, film))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for path, film in self._films:
                if (problem := film.exception()) is not None:
                    raise DayshiftError(f"{path} could not be rendered: {problem}") from problem


def _film(path: Path, spec: RolloutSpec, start: RolloutStart, states: list[NDArray[np.float64]]) -> None:
    from dayshift.dataset_export.video import VideoWriter, counts_path
    from dayshift.sim.render import FrameRenderer

    size = spec.image_size
    with (
        FrameRenderer() as renderer,
        VideoWriter(path, width=2 * size, height=size, fps=CONTROL_HZ) as video,
    ):
        renderer.load(spec, start)
        for number, state in enumerate(states):
            index = number * _STEPS_PER_PICTURE
            images = renderer.render(index, state)
            upright = [image[:, ::-1] for image in images.values()]
            video.write(np.concatenate(upright, axis=1), index)
    counts_path(path).unlink()  # statistics that only a dataset needs
