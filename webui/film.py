"""A run as an MP4: what the page shows, faster in the operation than in the reviews."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from pathlib import Path

import av
import numpy as np
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from dayshift.types import DayshiftError
from dayshift.webui.exact import ExactRenderer
from dayshift.webui.film_layout import HEIGHT, WIDTH, FilmLayout, Scene, cameras_per_robot, robots_shown
from dayshift.webui.pictures import Moment, Pictures
from dayshift.webui.records import HoursRecord
from dayshift.webui.run_index import RunIndex

FPS = 30
_LAST_PICTURE_S = 2.0  # the end stands for so long
_TALK = 8  # exchanges read for each picture; fewer fit


@dataclass(frozen=True, slots=True, kw_only=True)
class FilmOptions:
    """How a film runs. Speeds are run seconds per second of film.

    `robot`: whose planner and reviews are shown (default: the first). `from_s` and `to_s` cut the run.
    """

    speed: float = 60.0
    review_speed: float = 20.0
    robot: str | None = None
    title: str | None = None
    from_s: float = 0.0
    to_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Film:
    """What was made."""

    path: Path
    num_frames: int

    @property
    def duration_s(self) -> float:
        return self.num_frames / FPS


def make_film(
    run_dir: Path,
    to: Path,
    options: FilmOptions = FilmOptions(),
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Film:
    """Write a run, finished or not, as an H.264 MP4 at `to`. Raises DayshiftError."""
    if to.exists():
        raise DayshiftError(f"{to} exists already: choose another name")
    for name, speed in (("speed", options.speed), ("review speed", options.review_speed)):
        if not 0.1 <= speed <= 1000:
            raise DayshiftError(f"{name} {speed}: allowed are 0.1 to 1000")
    index = RunIndex(run_dir)
    pictures, renderer = Pictures(run_dir, index.run.fps), ExactRenderer()
    try:
        times = list(film_times(index, options))
        layout = FilmLayout(index, options.title or index.run.name)
        with _Encoder(to) as encoder:
            for number, (t, speed) in enumerate(times, 1):
                scene = look(index, pictures, renderer, t, speed, _focus(index, options))
                encoder.write(layout.draw(scene))
                on_progress(number, len(times))
        return Film(path=to, num_frames=len(times))
    finally:
        renderer.close()
        pictures.close()
        index.close()


def film_times(index: RunIndex, options: FilmOptions) -> Iterator[tuple[float, float]]:
    """(run time, speed) of each of the film's frames."""
    hours = index.robot(_focus(index, options)).hours
    end_s = index.end_s if options.to_s is None else min(options.to_s, index.end_s)
    t, speed = options.from_s, options.speed
    if t >= end_s:
        raise DayshiftError(f"nothing to film between {t:.1f} s and {end_s:.1f} s")
    while t < end_s:
        speed = options.review_speed if is_in_review(hours, t) else options.speed
        yield t, speed
        t += speed / FPS
    for _ in range(round(_LAST_PICTURE_S * FPS)):
        yield end_s, speed


def is_in_review(hours: list[HoursRecord], t: float) -> bool:
    """Whether the robot with these hours is reviewing a shift at `t`."""
    return any(one.is_review and one.start_s <= t and (one.end_s is None or t < one.end_s) for one in hours)


def look(
    index: RunIndex, pictures: Pictures, renderer: ExactRenderer, t: float, speed: float, focus: str
) -> Scene:
    """All that a picture of the film shows."""
    names = robots_shown([row.robot for row in index.robot_rows], focus)
    cameras = cameras_per_robot(len(names))
    images: dict[tuple[str, str], Image.Image] = {}
    moments: dict[str, Moment] = {}
    for name in names:
        moment = pictures.moment(index.robot(name), t)
        if moment is None:
            continue
        moments[name] = moment
        found = pictures.recorded(moment, cameras)
        if not found:
            try:
                found = renderer.submit(index.run_dir, moment).result()
            except BrokenProcessPool as error:
                raise DayshiftError("the renderer's process crashed; its messages are above") from error
        for picture in found:
            images[name, picture.camera] = Image.open(BytesIO(picture.jpeg)).convert("RGB")
    exchanges = index.robot(focus).exchanges
    said = [one.idx for one in exchanges if one.at <= t][-_TALK:]
    talk = index.records.talk(focus, said[0], said[-1]) if said else []
    return Scene(
        t=t,
        speed=speed,
        focus=focus,
        robots=names,
        cameras=cameras,
        moments=moments,
        images=images,
        talk=talk,
    )


def _focus(index: RunIndex, options: FilmOptions) -> str:
    names = [row.robot for row in index.robot_rows]
    if options.robot is None:
        return names[0]
    if options.robot not in names:
        raise DayshiftError(f"robot {options.robot!r}: this run has {', '.join(names[:20])}")
    return options.robot


class _Encoder:
    """An MP4 that appears under its name when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(path.name + ".part")
        self._num = 0
        try:
            self._part.touch()  # libav opens it with the first picture only
        except OSError as error:
            raise DayshiftError(f"{path} cannot be written ({error.strerror})") from error
        self._container = av.open(str(self._part), "w", format="mp4", options={"movflags": "faststart"})
        stream = self._container.add_stream("libx264", rate=FPS, options={"preset": "veryfast", "crf": "21"})
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        self._stream = stream

    def write(self, image: Image.Image) -> None:
        frame = VideoFrame.from_ndarray(np.asarray(image), format="rgb24")
        frame.pts, frame.time_base = self._num, Fraction(1, FPS)
        self._num += 1
        self._container.mux(self._stream.encode(frame))

    def __enter__(self) -> _Encoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._container.mux(self._stream.encode(None))
        finally:
            self._container.close()
            if kind is None:
                self._part.rename(self._path)
            else:
                self._part.unlink(missing_ok=True)
