"""One page's websocket: takes its messages in, and is the `Page` that the feed sends to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from dayshift.types import DayshiftError
from dayshift.webui import protocol as ask
from dayshift.webui.acts import Desk
from dayshift.webui.feed import feed
from dayshift.webui.library import Library, OpenRun
from dayshift.webui.queries import answer, describe

logger = logging.getLogger(__name__)
MAX_OPEN_QUESTIONS = 32
_ABOUT_A_RUN = (
    ask.AskBars, ask.AskLanes, ask.AskSeries, ask.AskLog, ask.AskLogPlace, ask.AskTalk, ask.AskTurns,
    ask.AskJump, ask.AskFrame, ask.AskAttempt, ask.AskSessionsAt,
)  # fmt: skip


class Connection:
    """Serves one page until it goes away."""

    def __init__(self, websocket: WebSocket, library: Library, desk: Desk) -> None:
        self._websocket = websocket
        self._library = library
        self._desk = desk
        self._run: OpenRun | None = None
        self._wish: ask.Wish | None = None
        self._has_wish = asyncio.Event()
        self._sending = asyncio.Lock()
        self._room = asyncio.Semaphore(MAX_OPEN_QUESTIONS)

    async def serve(self) -> None:
        """Answer and feed the page. Returns when it has gone."""
        try:
            await self._websocket.accept()
        except OSError:  # it has gone before
            return
        with contextlib.suppress(WebSocketDisconnect):
            try:
                async with asyncio.TaskGroup() as tasks:
                    feeding = tasks.create_task(feed(self))
                    await self._receive_all(tasks)
                    feeding.cancel()
            except* WebSocketDisconnect:
                pass

    # --- for the feed ----------------------------------------------------------------------------

    async def next_wish(self) -> tuple[OpenRun, ask.Wish]:
        while True:
            await self._has_wish.wait()
            self._has_wish.clear()
            if self._run is not None and self._wish is not None:
                return self._run, self._wish

    async def unless_newer[R](self, work: Awaitable[R]) -> R | None:
        working = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(self._has_wish.wait())
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            return await working if working.done() else None
        finally:
            waiting.cancel()
            working.cancel()

    async def send(self, message: ask.Reply | ask.Changes | ask.Shown) -> None:
        await self._send({"type": "websocket.send", "text": ask.encode(message)})

    async def send_picture(self, picture: bytes) -> None:
        await self._send({"type": "websocket.send", "bytes": picture})

    async def _send(self, message: dict[str, Any]) -> None:
        """Raises WebSocketDisconnect, whoever of those that send has noticed first that the page has gone."""
        async with self._sending:
            try:
                await self._websocket.send(message)
            except RuntimeError as error:  # so starlette and uvicorn say that the socket is closed already
                raise WebSocketDisconnect(1006) from error

    # --- from the page ---------------------------------------------------------------------------

    async def _receive(self) -> str:
        """Raises WebSocketDisconnect, also when one that sends has noticed first that the page has gone."""
        try:
            return await self._websocket.receive_text()
        except RuntimeError as error:
            raise WebSocketDisconnect(1006) from error

    async def _receive_all(self, tasks: asyncio.TaskGroup) -> None:
        with contextlib.suppress(WebSocketDisconnect):
            while True:
                text = await self._receive()
                try:
                    message = ask.decode(text)
                except msgspec.MsgspecError as error:
                    await self.send(ask.Reply(id=0, error=f"not understood: {error}"))
                    continue
                if isinstance(message, ask.Wish):
                    self._wish = message
                    self._has_wish.set()
                elif isinstance(message, ask.Open):  # before the questions that follow it
                    await self._answer(message)
                else:
                    await self._room.acquire()
                    tasks.create_task(self._answer_and_make_room(message))

    async def _answer_and_make_room(self, question: ask.Question) -> None:
        try:
            await self._answer(question)
        finally:
            self._room.release()

    async def _answer(self, question: ask.Question) -> None:
        try:
            reply = ask.Reply(id=question.id, body=await self._find_answer(question))
        except DayshiftError as error:
            reply = ask.Reply(id=question.id, error=str(error))
        except Exception:
            logger.exception("answering %s", type(question).__name__)
            reply = ask.Reply(id=question.id, error="an error in Dayshift; see the page's log")
        with contextlib.suppress(WebSocketDisconnect):
            await self.send(reply)

    async def _find_answer(self, question: ask.Question) -> Any:
        if isinstance(question, ask.Open):
            self._wish = None  # it was about another run
            self._run = await self._library.open(question.run)
            return await self._run.call(describe, self._run)
        if isinstance(question, _ABOUT_A_RUN):
            if self._run is None:
                raise DayshiftError("open a run first")
            return await answer(self._run, question)
        return await self._desk.do(self._run, question)
