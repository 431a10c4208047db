"""An exported dataset in the page: episodes as JSON, pictures as PNG, bit for bit as they are decoded.

/dataset                                              the page
/dataset/overview                                     all episodes in a line each
/dataset/episodes/7                                   curves, words and facts of one
/dataset/episodes/7/pictures/<camera>/42.png          one picture
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import cv2
import msgspec
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response

from dayshift.dataset_export.looking.dataset import Dataset, Episode, EpisodeEntry, Words
from dayshift.dataset_export.looking.pictures import DatasetPictures
from dayshift.types import DayshiftError
from dayshift.webui.library import RunEntry

_FAST_PNG = [cv2.IMWRITE_PNG_COMPRESSION, 1]


class EpisodeLine(msgspec.Struct, frozen=True, kw_only=True):
    """An episode in the list. What the dataset does not say is "" or None."""

    episode: int
    num_frames: int
    task: str
    step: str  # shift.job.step
    attempt: int | None
    outcome: str
    is_given_up: bool
    is_review: bool


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """What the page is sent when it opens."""

    name: str
    fps: int
    cameras: list[str]
    episodes: list[EpisodeLine]


class CurveBody(msgspec.Struct, frozen=True, kw_only=True):
    """A feature over the frames, one list per dimension."""

    feature: str
    labels: tuple[str, ...]
    values: list[list[float]]


class EpisodeBody(msgspec.Struct, frozen=True, kw_only=True):
    """All of an episode but its pictures.

    `as_recorded`: per camera, whether first and last picture have the hashes kept of them. `run`: the
    recorded run's name in the live page, if it is still there; `identity`: (run, attempt) in any case.
    """

    line: EpisodeLine
    facts: dict[str, Any]
    curves: list[CurveBody]
    words: tuple[Words, ...]
    as_recorded: dict[str, bool | None]
    identity: tuple[str, str] | None
    run: str | None
    recorded_at: list[float] | None


class DatasetView:
    """A dataset that is looked at. A context manager that closes its videos.

    `list_runs` gives the runs whose page can be opened.
    """

    def __init__(self, dataset: Dataset, list_runs: Callable[[], list[RunEntry]]) -> None:
        self._dataset = dataset
        self._pictures = DatasetPictures(dataset)
        self._list_runs = list_runs

    def overview(self) -> Overview:
        return Overview(
            name=self._dataset.root.resolve().name,
            fps=self._dataset.fps,
            cameras=self._dataset.cameras,
            episodes=[_line(entry) for entry in self._dataset.entries],
        )

    def episode(self, episode_index: int) -> EpisodeBody:
        """Raises DayshiftError."""
        episode = self._dataset.episode(episode_index)
        return EpisodeBody(
            line=_line(episode.entry),
            facts=dict(episode.entry.facts),
            curves=[
                CurveBody(feature=curve.feature, labels=curve.labels, values=curve.values.T.tolist())
                for curve in episode.curves
            ],
            words=episode.words,
            as_recorded={
                camera: self._pictures.is_as_recorded(camera, episode_index)
                for camera in self._dataset.cameras
            },
            identity=episode.identity,
            run=self._find_run(episode),
            recorded_at=None if episode.recorded_at is None else episode.recorded_at.tolist(),
        )

    def png(self, camera: str, episode_index: int, frame_index: int) -> bytes:
        """Raises DayshiftError."""
        image = self._pictures.picture(camera, episode_index, frame_index)
        _, png = cv2.imencode(".png", image[..., ::-1], _FAST_PNG)
        return png.tobytes()

    def _find_run(self, episode: Episode) -> str | None:
        if episode.identity is None:
            return None
        names = {Path(entry.run).name: entry.run for entry in self._list_runs()}
        return names.get(episode.identity[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pictures.__exit__()


def _line(entry: EpisodeEntry) -> EpisodeLine:
    facts = entry.facts
    return EpisodeLine(
        episode=entry.episode_index,
        num_frames=entry.num_frames,
        task=entry.task,
        step=".".join(str(facts[name]) for name in ("shift", "job", "step")) if facts else "",
        attempt=facts.get("attempt"),
        outcome=facts.get("outcome", ""),
        is_given_up=bool(facts.get("give_up_reason")),
        is_review=facts.get("is_review", False),
    )


def add_dataset_routes(app: FastAPI, static: Path, not_built: str) -> None:
    """Routes that answer from `app.state.dataset_view`; the built page is in `static`."""
    page = static / "dataset.html"

    def show_page() -> Response:
        if page.is_file():
            return FileResponse(page)
        return PlainTextResponse(not_built, 503)

    app.add_api_route("/dataset", show_page, response_class=Response)
    app.add_api_route("/dataset/overview", _overview, response_class=Response)
    app.add_api_route("/dataset/episodes/{episode}", _episode, response_class=Response)
    app.add_api_route(
        "/dataset/episodes/{episode}/pictures/{camera}/{frame}.png", _picture, response_class=Response
    )


def _overview(request: Request) -> Response:
    return _answer(_view(request).overview)


def _episode(request: Request, episode: int) -> Response:
    return _answer(lambda: _view(request).episode(episode))


def _picture(request: Request, episode: int, camera: str, frame: int) -> Response:
    png = _or_not_found(lambda: _view(request).png(camera, episode, frame))
    return Response(png, media_type="image/png", headers={"cache-control": "no-store"})


def _answer(make: Callable[[], msgspec.Struct]) -> Response:
    body = msgspec.json.encode(_or_not_found(make))
    return Response(body, media_type="application/json", headers={"cache-control": "no-store"})


def _or_not_found[T](make: Callable[[], T]) -> T:
    try:
        return make()
    except DayshiftError as error:
        raise HTTPException(404, str(error)) from error


def _view(request: Request) -> DatasetView:
    return request.app.state.dataset_view
