"""A picture for every control step: the live video where it has them all, else rendered from states.

Rendered pictures are kept beside the attempt's other files, so that they are rendered once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from dayshift.dataset_export import attempt_files as files
from dayshift.dataset_export.durable import flush_to_disk, only_writer
from dayshift.dataset_export.run_folder import RecordedAttempt
from dayshift.dataset_export.video import H264, Codec, Image, VideoWriter, counts_path
from dayshift.sim.types import Camera, RolloutSpec, RolloutStart

PATIENCE_S = 600.0  # rendering the longest attempt takes seconds, on a machine that is busy minutes


class Renderer(Protocol):
    """Renders frames of recorded rollouts: `sim.render.FrameRenderer`."""

    def load(self, spec: RolloutSpec, start: RolloutStart) -> None: ...

    def render(
        self, frame_index: int, sim_state: NDArray[np.float64], cameras: tuple[Camera, ...] | None = None
    ) -> dict[Camera, Image]: ...


MakeRenderer = Callable[[], AbstractContextManager[Renderer]]


def simulator_renderer() -> AbstractContextManager[Renderer]:
    """MuJoCo's renderer; importing it loads the simulator."""
    from dayshift.sim.render import FrameRenderer

    return FrameRenderer()


class LazyRenderer:
    """A renderer that is made when the first picture is missing. A context manager."""

    def __init__(self, make: MakeRenderer) -> None:
        self._make = make
        self._stack = ExitStack()
        self._renderer: Renderer | None = None

    def get(self) -> Renderer:
        if self._renderer is None:
            self._renderer = self._stack.enter_context(self._make())
        return self._renderer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def dense_path(attempt: RecordedAttempt, camera: Camera, codec: Codec = H264) -> Path:
    """Where the video with a picture for every control step is, or will be once it is rendered."""
    if codec == H264 and attempt.recording.num_images.get(camera) == attempt.recording.num_frames:
        return files.video_path(attempt.folder, camera)
    return attempt.folder / f"{camera}.dense.{codec.name}.mp4"


def missing_cameras(
    attempt: RecordedAttempt, cameras: tuple[Camera, ...], codec: Codec = H264
) -> tuple[Camera, ...]:
    """Cameras whose pictures `make_dense` has still to make."""
    live = files.video_path
    return tuple(
        camera
        for camera in cameras
        if (path := dense_path(attempt, camera, codec)) != live(attempt.folder, camera) and not path.is_file()
    )


def make_dense(
    attempt: RecordedAttempt,
    cameras: tuple[Camera, ...],
    get_renderer: Callable[[], Renderer],
    codec: Codec = H264,
    *,
    patience_s: float = PATIENCE_S,
) -> bool:
    """Render and keep the pictures of every control step that are not there; False when all are.

    A kill leaves no half video behind. One process renders an attempt: another one waits for it, up to
    `patience_s`, and takes what it made; then raises BusyError.
    """
    if not missing_cameras(attempt, cameras, codec):
        return False
    with only_writer(attempt.folder, patience_s=patience_s):
        missing = missing_cameras(attempt, cameras, codec)
        if missing:
            _make_videos(attempt, missing, get_renderer(), codec)
        return bool(missing)


def _make_videos(
    attempt: RecordedAttempt, cameras: tuple[Camera, ...], renderer: Renderer, codec: Codec
) -> None:
    paths = {camera: dense_path(attempt, camera, codec) for camera in cameras}
    unfinished = {camera: path.with_name(f"{path.stem}.part.mp4") for camera, path in paths.items()}
    writers: dict[Camera, VideoWriter] = {}
    try:
        for index, images in enumerate(_render(attempt, cameras, renderer)):
            for camera, image in images.items():
                if camera not in writers:
                    height, width = image.shape[:2]
                    writers[camera] = VideoWriter(
                        unfinished[camera], width=width, height=height, fps=attempt.fps, codec=codec
                    )
                writers[camera].write(image, index)
        for writer in writers.values():
            writer.close()
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise
    for camera, path in paths.items():
        # The counts first: a video with its final name is complete.
        for source, target in (
            (counts_path(unfinished[camera]), counts_path(path)),
            (unfinished[camera], path),
        ):
            flush_to_disk(source)
            source.replace(target)
    flush_to_disk(attempt.folder)


def _render(
    attempt: RecordedAttempt, cameras: tuple[Camera, ...], renderer: Renderer
) -> Iterator[dict[Camera, Image]]:
    start = attempt.start()
    renderer.load(start.spec, start.start)
    for index, state in enumerate(attempt.frames().sim_state):
        yield renderer.render(index, state, cameras)
