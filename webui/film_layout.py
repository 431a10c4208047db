"""The picture of a film: title and clock, cameras, the planner's words, the shift board, the time line."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from PIL import Image, ImageDraw, ImageFont

from dayshift.dataset_export.tables import ExchangeRow
from dayshift.sim.types import CAMERAS, Camera
from dayshift.webui.board import step_ends
from dayshift.webui.pictures import Moment
from dayshift.webui.run_index import OUTCOME_CODES, REVIEW_CODE, RunIndex
from dayshift.webui.words import describe_reply

WIDTH, HEIGHT = 1280, 720
MAX_ROBOTS = 16  # with cameras in the picture
_MAX_BOARD_ROWS = 8
_BOTH_CAMERAS_UP_TO = 4

_PAPER, _PANEL, _INK, _DIM, _LINE = "#14171a", "#1c2024", "#e8eaed", "#8b939c", "#2c3238"
_COLORS = {
    "pending": "#30363d", "running": "#e8eaed", "done": "#3fb27f", "failed": "#d9a03f",
    "given_up": "#e0605e", "redone": "#4aa8d8", "infra": "#8b7fc7", "recall": "#b48ae8",
}  # fmt: skip
_CODE_COLORS = {
    code + review: _COLORS["redone" if review and name == "done" else name]
    for name, code in OUTCOME_CODES.items()
    for review in (0, REVIEW_CODE)
}
_MARGIN, _HEADER, _TIME_LINE = 24, 64, 56
_BOARD_ROW = 22
_MIN_TALK_WIDTH = 400
_CHARACTER = 7.6  # mean width at 15 pixels
_LABEL = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What one picture shows; `images` RGB by (robot, camera)."""

    t: float
    speed: float
    focus: str
    robots: list[str]
    cameras: tuple[Camera, ...]
    moments: dict[str, Moment]
    images: dict[tuple[str, Camera], Image.Image]
    talk: list[ExchangeRow]


def robots_shown(names: list[str], focus: str) -> list[str]:
    """The robots whose cameras are in the picture."""
    if len(names) <= MAX_ROBOTS:
        return names
    return [focus, *(name for name in names if name != focus)][:MAX_ROBOTS]


def cameras_per_robot(num_robots: int) -> tuple[Camera, ...]:
    """Both cameras of a few robots, the first camera of many."""
    return CAMERAS if num_robots <= _BOTH_CAMERAS_UP_TO else CAMERAS[:1]


class FilmLayout:
    """Draws the pictures of one run's film."""

    def __init__(self, index: RunIndex, title: str) -> None:
        self._index = index
        self._title = title
        self._end_s = max(index.end_s, 1e-3)
        rows = [row.robot for row in index.robot_rows][:_MAX_BOARD_ROWS]
        self._board = {
            name: list(zip(index.robot(name).steps, step_ends(index.robot(name)), strict=True))
            for name in rows
        }

    def draw(self, scene: Scene) -> Image.Image:
        """The whole picture, RGB, WIDTH x HEIGHT."""
        image = Image.new("RGB", (WIDTH, HEIGHT), _PAPER)
        pen = ImageDraw.Draw(image)
        self._draw_header(pen, scene)
        right = self._draw_tiles(image, pen, scene)
        self._draw_talk(pen, scene, left=right + _MARGIN)
        self._draw_board(pen, scene)
        self._draw_time_line(pen, scene)
        return image

    def _draw_header(self, pen: ImageDraw.ImageDraw, scene: Scene) -> None:
        row = self._index.robot_rows[0]
        num = len(self._index.robot_rows)
        robots = "1 robot" if num == 1 else f"{num} robots"
        about = f"{robots}  ·  planner {row.planner_model}, memory {row.planner_memory}"
        pen.text((_MARGIN, 14), self._title, _INK, _font(22))
        pen.text((_MARGIN, 42), about, _DIM, _font(13))
        pen.text((WIDTH - _MARGIN, 10), clock(scene.t), _INK, _font(30), anchor="ra")
        pen.text(
            (WIDTH - _MARGIN, 44), f"{self._phase(scene)}  ·  {scene.speed:g}x", _DIM, _font(13), anchor="ra"
        )

    def _phase(self, scene: Scene) -> str:
        hours = [one for one in self._index.robot(scene.focus).hours if one.start_s <= scene.t]
        if not hours:
            return "waiting"
        return f"review of shift {hours[-1].shift}" if hours[-1].is_review else f"shift {hours[-1].shift}"

    @property
    def _footer(self) -> int:
        """Height of board and time line."""
        return _TIME_LINE + _BOARD_ROW * len(self._board)

    def _draw_tiles(self, image: Image.Image, pen: ImageDraw.ImageDraw, scene: Scene) -> int:
        """Returns where the tiles end on the right."""
        places = [(robot, camera) for robot in scene.robots for camera in scene.cameras]
        width, height = WIDTH - _MIN_TALK_WIDTH - 3 * _MARGIN, HEIGHT - _HEADER - self._footer - _MARGIN
        size, columns = max(
            (_tile_size(len(places), columns, width, height), columns)
            for columns in range(len(scene.cameras), len(places) + 1, len(scene.cameras))
        )
        for number, (robot, camera) in enumerate(places):
            x = _MARGIN + number % columns * (size + 8)
            y = _HEADER + 8 + number // columns * (size + _LABEL + 8)
            picture = scene.images.get((robot, camera))
            if picture is None:
                pen.rectangle((x, y, x + size - 1, y + size - 1), _PANEL)
            else:
                image.paste(picture.resize((size, size), Image.Resampling.BILINEAR), (x, y))
            if camera == scene.cameras[0]:
                pen.text((x, y + size + 3), self._tile_label(scene, robot), _DIM, _font(11))
        return _MARGIN + columns * (size + 8) - 8

    def _tile_label(self, scene: Scene, robot: str) -> str:
        moment = scene.moments.get(robot)
        if moment is None:
            return robot
        attempt = self._index.attempts[moment.attempt_id]
        step = f"{attempt.shift}.{attempt.job}.{attempt.step}"
        return f"{robot}  ·  {step}  ·  frame {moment.index + 1}/{moment.num_frames}"

    def _draw_talk(self, pen: ImageDraw.ImageDraw, scene: Scene, *, left: int) -> None:
        top, bottom = _HEADER + 8, HEIGHT - self._footer - _MARGIN
        num_characters = int((WIDTH - _MARGIN - left) / _CHARACTER)
        pen.text((left, top), f"PLANNER OF {scene.focus.upper()}", _DIM, _font(11))
        y = bottom
        for row in reversed(scene.talk):
            lines = _talk_lines(row, num_characters, is_answered=row.at + row.latency_s <= scene.t)
            height = 20 * len(lines) + 12
            if y - height < top + 20:
                break
            y -= height
            for number, (line, color) in enumerate(lines):
                pen.text((left, y + 20 * number), line, color, _font(15))

    def _draw_board(self, pen: ImageDraw.ImageDraw, scene: Scene) -> None:
        top, row_height = HEIGHT - self._footer, _BOARD_ROW
        for number, (name, steps) in enumerate(self._board.items()):
            y = top + number * row_height
            pen.text((_MARGIN, y), name, _DIM, _font(11))
            states = self._states(name, steps, scene.t)
            gaps = len({shift for shift, *_ in states})
            width = min(32.0, (WIDTH - 2 * _MARGIN - 90 - 8 * gaps) / max(1, len(states)))
            x, last_shift = float(_MARGIN + 90), None
            for (shift, *_), state in states.items():
                if last_shift not in (None, shift):
                    x += 8
                last_shift = shift
                pen.rectangle((x, y + 1, x + width - 2, y + row_height - 7), _COLORS[state])
                x += width

    def _states(self, name: str, steps: list, t: float) -> dict[tuple[int, int, int], str]:
        """State of each step of the plan at `t`; a redo shows on its step."""
        states: dict[tuple[int, int, int], str] = {}
        for step, end in steps:
            key = (step.shift, step.job, step.step)
            is_over = end is not None and end <= t
            if not step.is_review:
                states[key] = step.state if is_over else "pending"
            elif is_over and step.state == "done":
                states[key] = "redone"
        attempt = self._index.robot(name).attempt_at(t)
        if attempt is not None and t < attempt.end_s:
            states[attempt.shift, attempt.job, attempt.step] = "running"
        return states

    def _draw_time_line(self, pen: ImageDraw.ImageDraw, scene: Scene) -> None:
        left, right, top = _MARGIN, WIDTH - _MARGIN, HEIGHT - 40
        pen.rectangle((left, top, right, top + 12), _PANEL)
        scale = (right - left) / self._end_s
        for start, end, code in self._index.bars(scene.focus).window(0, self._end_s, right - left):
            x = left + start * scale
            pen.rectangle((x, top, max(x + 1, left + end * scale - 1), top + 12), _CODE_COLORS[code])
        x = left + scene.t * scale
        pen.line((x, top - 6, x, top + 18), _INK, 2)


def _tile_size(num_tiles: int, columns: int, width: int, height: int) -> int:
    """Pixels of a tile's side when so many stand in a row."""
    rows = ceil(num_tiles / columns)
    return min((width - 8 * (columns - 1)) // columns, (height - 8 * (rows - 1)) // rows - _LABEL)


@lru_cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _talk_lines(row: ExchangeRow, num_characters: int, *, is_answered: bool) -> list[tuple[str, str]]:
    """An exchange as lines with their colours."""

    def wrapped(text: str, color: str) -> list[tuple[str, str]]:
        lines = textwrap.wrap(text, num_characters, max_lines=3, placeholder=" …")
        return [(line, color) for line in lines]

    lines = wrapped(row.message, _DIM)
    if not is_answered:
        return lines
    verb, text = describe_reply(row.reply or row.error)
    color = _COLORS.get({"give up": "given_up", "redo": "redone"}.get(verb, ""), _INK)
    lines += wrapped(f"{verb}: {text}" if verb and text else verb or text, color)
    if row.recalled_turns:
        num_tokens = row.ledger.get("recalled", 0)
        lines += wrapped(f"recalled {len(row.recalled_turns)} turns, {num_tokens} tokens", _COLORS["recall"])
    return lines


def clock(seconds: float) -> str:
    """h:mm:ss.t"""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02d}:{rest:04.1f}"
