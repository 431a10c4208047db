"""The feed: what a page wants to see, sent as fast as that page takes it. One of the five main loops.

    page: wish ──► pictures, changes, shown ──► page: next wish …

The page keeps one clock and asks for moments of it, live or recorded alike. Nothing is sent unasked:
of several wishes the newest counts, so a slow page gets fewer pictures, and slows down nobody.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from dayshift.sim.types import Camera
from dayshift.webui.board import describe_board
from dayshift.webui.exact import RenderingError
from dayshift.webui.library import OpenRun
from dayshift.webui.pictures import Moment, Picture
from dayshift.webui.protocol import Changes, Shown, Tile, Wish, encode_picture

NEWS_PATIENCE_S = 0.5  # a live page hears at least this often that nothing has happened


class Page(Protocol):
    """A connected page."""

    async def next_wish(self) -> tuple[OpenRun, Wish]:
        """The newest wish that was not yet taken, and the run that it is about. Waits for one."""
        ...

    async def unless_newer[R](self, work: Awaitable[R]) -> R | None:
        """The result of slow work; None as soon as there is a newer wish."""
        ...

    async def send(self, message: Changes | Shown) -> None: ...

    async def send_picture(self, picture: bytes) -> None: ...


@dataclass(slots=True)
class OnScreen:
    """What a page shows already."""

    run: OpenRun | None = None
    news_number: int = -1
    pictures: dict[tuple[str, Camera], tuple[str, int]] = field(default_factory=dict)  # -> attempt, index
    running: dict[str, Any] = field(default_factory=dict)
    series: list[str] = field(default_factory=list)


async def feed(page: Page) -> None:
    """Fulfil a page's wishes until it goes away (its calls then raise)."""
    screen = OnScreen()
    while True:
        run, wish = await page.next_wish()
        if run is not screen.run:
            screen = OnScreen(run)
        if wish.t is None:
            await run.wait_for_news(screen.news_number, NEWS_PATIENCE_S)
        screen.news_number = run.news_number
        t = run.now() if wish.t is None else wish.t

        tiles = {}
        for tile in wish.tiles:
            moment, pictures = await look(page, run, tile, t, wish)
            if moment is not None:
                tiles[tile.robot] = asdict(moment)
                await send_new(page, run, tile, moment, pictures, wish, screen)
        if changes := await find_changes(run, wish, screen):
            await page.send(changes)
        await page.send(await describe_shown(run, wish, t, tiles))


async def look(
    page: Page, run: OpenRun, tile: Tile, t: float, wish: Wish
) -> tuple[Moment | None, Sequence[Picture]]:
    """What a robot's cameras show at `t`, from the live feed or from the files."""
    live = run.live.newest(tile.robot) if wish.t is None else run.live.at(tile.robot, t)
    if live is not None and live.attempt_id not in run.index.attempts:
        moment = Moment(
            attempt_id=live.attempt_id, index=live.index, num_frames=live.index + 1, t=live.t, is_over=False
        )
        return moment, live.pictures
    robot = run.index.robot(tile.robot)
    moment = await run.call(run.pictures.moment, robot, t)
    if moment is None:
        return None, ()
    pictures = await run.call(run.pictures.recorded, moment, tile.cameras)
    is_missing = {picture.camera for picture in pictures if picture.index == moment.index} < set(tile.cameras)
    if is_missing and (wish.exact_robot == tile.robot or not pictures):
        try:
            exact = await page.unless_newer(run.renderer.render(run.path, moment))
        except RenderingError:  # the recorded picture has to do
            return moment, pictures
        return moment, exact or pictures
    return moment, pictures


async def send_new(
    page: Page,
    run: OpenRun,
    tile: Tile,
    moment: Moment,
    pictures: Sequence[Picture],
    wish: Wish,
    screen: OnScreen,
) -> None:
    """Send the pictures that are not on the page's screen yet."""
    for picture in pictures:
        place, shown = (tile.robot, picture.camera), (moment.attempt_id, picture.index)
        if picture.camera in tile.cameras and screen.pictures.get(place) != shown:
            await page.send_picture(
                encode_picture(
                    camera=picture.camera,
                    robot=run.number_of(tile.robot),
                    seek=wish.seek,
                    t=moment.t,
                    jpeg=picture.jpeg,
                )
            )
            screen.pictures[place] = shown


async def find_changes(run: OpenRun, wish: Wish, screen: OnScreen) -> Changes | None:
    """Boards on the screen that have changed, and what each robot is at, if that has."""
    newer = [name for name, seen in wish.boards.items() if run.index.robot(name).revision > seen]
    boards = {name: await run.call(describe_board, run.index.robot(name)) for name in newer}
    running, series = dict(run.live.running), run.index.series.names
    if not boards and running == screen.running and series == screen.series:
        return None
    screen.running, screen.series = running, series
    return Changes(boards=boards, running=running, series=series)


async def describe_shown(run: OpenRun, wish: Wish, t: float, tiles: dict[str, Any]) -> Shown:
    """The end of a fulfilled wish."""
    totals = await run.call(run.totals)
    return Shown(
        seek=wish.seek,
        t=t,
        now_s=run.now(),
        is_live=run.live.is_live,
        is_finished=totals.is_finished,
        revision=run.index.growth,
        totals=totals.at(t),
        tiles=tiles,
    )
