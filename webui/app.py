"""The page's web application: static files, one websocket, and files that were made on request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI, HTTPException, Request, WebSocket
from fastapi.responses import FileResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles

from dayshift.webui.acts import Desk
from dayshift.webui.connection import Connection
from dayshift.webui.gate import Gate
from dayshift.webui.launcher import Launcher
from dayshift.webui.library import Library

if TYPE_CHECKING:
    from dayshift.dataset_export.looking.dataset import Dataset

STATIC = Path(__file__).parent / "static"
NOT_BUILT = "The page is not built. In a clone of Dayshift, run: make page\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOptions:
    """What is served, to whom.

    runs_dir: the folder of runs · launcher: None if runs cannot be started from here · is_read_only:
    nothing can be started, stopped or asked · api_key: needed to listen on other than loopback addresses ·
    dataset: looked at under /dataset.
    """

    runs_dir: Path
    launcher: Launcher | None = None
    is_read_only: bool = False
    host: str = "127.0.0.1"
    port: int = 8080  # 0: any free one
    api_key: str | None = None
    dataset: Dataset | None = None

    @property
    def path(self) -> str:
        """What is opened first: the page of the dataset, or that of the runs."""
        return "" if self.dataset is None else "dataset"


def create_app(options: PageOptions) -> FastAPI:
    """The application for `options`."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        library = Library(options.runs_dir)
        desk = Desk(library, options.launcher, is_read_only=options.is_read_only)
        app.state.library, app.state.desk = library, desk
        reading = asyncio.create_task(library.open_newest())
        with _look_at(app, options.dataset):
            try:
                yield
            finally:
                reading.cancel()
                await desk.close()
                await library.close()

    app = FastAPI(title="Dayshift", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_api_route("/health", _health)
    app.add_api_websocket_route("/socket", _socket)
    app.add_api_route("/tasks/{task_id}/file", _task_file, response_class=FileResponse)
    if options.dataset is not None:
        from dayshift.webui.dataset_view import add_dataset_routes

        add_dataset_routes(app, STATIC, NOT_BUILT)
    if (STATIC / "index.html").is_file():
        app.mount("/", StaticFiles(directory=STATIC, html=True))
    else:
        app.add_api_route("/", lambda: PlainTextResponse(NOT_BUILT, 503), response_class=PlainTextResponse)
    app.add_middleware(Gate, api_key=options.api_key)
    return app


@contextlib.contextmanager
def _look_at(app: FastAPI, dataset: Dataset | None) -> Iterator[None]:
    """Keep a dataset open for its page; its libraries take seconds to import, so only then."""
    if dataset is None:
        yield
        return
    from dayshift.webui.dataset_view import DatasetView

    with DatasetView(dataset, app.state.library.entries) as app.state.dataset_view:
        yield


async def _health() -> dict[str, str]:
    return {"status": "ok"}


async def _socket(websocket: WebSocket) -> None:
    state = websocket.app.state
    await Connection(websocket, state.library, state.desk).serve()


async def _task_file(task_id: int, request: Request) -> FileResponse:
    """The film that a task made."""
    tasks = request.app.state.desk.tasks.tasks
    task = next((task for task in tasks if task.task_id == task_id), None)
    if task is None or task.state != "done" or task.result is None or not task.result.is_file():
        raise HTTPException(404, "there is no such file")
    return FileResponse(task.result, filename=task.result.name)
