"""The picture of `dayshift bench robots`: waits, calls per second, and where KV came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import ceil, floor, log2, log10
from typing import Any

Rows = Sequence[Mapping[str, Any]]
"""RobotsRow as JSON."""

_WIDTH, _HEIGHT = 320, 240  # of a panel's axes
_LEFT, _TOP, _GAP, _BELOW = 60, 40, 90, 120
_SHORT_NAME = 18  # characters that fit into half a panel
_COLOURS = ("#1f6feb", "#d1570c", "#7a3fb5", "#2b7a3d")
_SOURCES = (("gpu", "#1f6feb"), ("host", "#79b8ff"), ("disk", "#b08800"), ("recomputed", "#d1570c"))
_STYLE = (
    "<style>text{font:13px sans-serif;fill:#57606a}.t{font-size:15px;font-weight:600}"
    ".g{stroke:#8c959f;stroke-opacity:.35}path{fill:none;stroke-width:2}</style>"
)


def draw_robots(servers: Mapping[str, Rows]) -> str:
    """An SVG with three panels; `servers` as `dayshift bench robots --json` prints them.

    Raises ValueError when there is no row.
    """
    numbers = sorted({row["num_robots"] for rows in servers.values() for row in rows})
    if not numbers:
        raise ValueError("no rows")
    waits = _Panel(
        0, "Seconds until the reply is whole", numbers, _values(servers, "p50_s", "p95_s"), is_log=True
    )
    calls = _Panel(1, "Calls per second", numbers, _values(servers, "calls_per_s"), is_log=False)
    parts = [*waits.axes(), *calls.axes()]
    median_and_tail = (("p50_s", "median", ""), ("p95_s", "95 %", "5 4"))
    legend: list[tuple[str, str, str]] = []
    for name, colour in zip(servers, _COLOURS, strict=False):
        for key, what, dashes in median_and_tail:
            parts.append(waits.line(servers[name], key, colour, dashes))
            legend.append((f"{name}, {what}", colour, dashes))
        parts.append(calls.line(servers[name], "calls_per_s", colour))
    parts += _legend(0, legend)
    parts += _legend(1, [(name, colour, "") for name, colour in zip(servers, _COLOURS, strict=False)])
    told = next((rows for rows in servers.values() if all(row["sources"] for row in rows)), ())
    parts += _source_bars(told, numbers)
    parts += _legend(2, [(name, colour, "") for name, colour in _SOURCES])
    width, height = _panel_left(3) - _GAP + 30, _TOP + _HEIGHT + _BELOW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f'{_STYLE}<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


class _Panel:
    """Axes: numbers of robots by powers of two to the right, values upwards."""

    def __init__(
        self, place: int, title: str, numbers: Sequence[int], values: Sequence[float], *, is_log: bool
    ) -> None:
        self.left, self.title, self.numbers, self.is_log = _panel_left(place), title, numbers, is_log
        if is_log:
            self.low, self.high = floor(log10(min(values))), ceil(log10(max(values)))
            self.high = max(self.high, self.low + 1)
            self.ticks = [10.0**power for power in range(self.low, self.high + 1)]
        else:
            step = 10 ** floor(log10(max(values))) or 1
            self.low, self.high = 0, ceil(max(values) / step) * step
            self.ticks = [step * i for i in range(round(self.high / step) + 1)]

    def x(self, number: int) -> float:
        """Where a number of robots stands."""
        span = log2(self.numbers[-1] / self.numbers[0]) or 1.0
        return self.left + 15 + (_WIDTH - 30) * log2(number / self.numbers[0]) / span

    def y(self, value: float) -> float:
        """How high a value stands."""
        place = log10(value) if self.is_log else value
        return _TOP + _HEIGHT * (1 - (place - self.low) / (self.high - self.low))

    def axes(self) -> Iterable[str]:
        """Title, lines at round values, and the numbers of robots."""
        yield _text(self.left, _TOP - 16, self.title, extra=' class="t"')
        for tick in self.ticks:
            y = self.y(tick)
            yield f'<line class="g" x1="{self.left}" x2="{self.left + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield _text(self.left - 8, y + 4, f"{tick:g}", extra=' text-anchor="end"')
        yield _text(self.left - 8, _TOP + _HEIGHT + 18, "robots", extra=' text-anchor="end"')
        for number in self.numbers:
            yield _text(self.x(number), _TOP + _HEIGHT + 18, str(number), extra=' text-anchor="middle"')

    def line(self, rows: Rows, key: str, colour: str, dashes: str = "") -> str:
        """One quantity of a server."""
        points = [(self.x(row["num_robots"]), self.y(row[key])) for row in rows]
        path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
        return f'<path d="{path}" stroke="{colour}" stroke-dasharray="{dashes}"/>{dots}'


def _source_bars(rows: Rows, numbers: Sequence[int]) -> Iterable[str]:
    """Where the context of a call came from, as bars of 100 %."""
    left, width = _panel_left(2), _WIDTH / max(1, len(numbers))
    yield _text(left, _TOP - 16, "Where the KV of a call was", extra=' class="t"')
    for place, row in enumerate(rows):
        x, y = left + width * (place + 0.15), float(_TOP + _HEIGHT)
        for name, colour in _SOURCES:
            height = _HEIGHT * row["sources"][name]
            y -= height
            yield (
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{0.7 * width:.1f}" height="{height:.1f}" '
                f'fill="{colour}"><title>{name}: {row["sources"][name]:.1%}</title></rect>'
            )
        label = str(row["num_robots"])
        yield _text(x + 0.35 * width, _TOP + _HEIGHT + 18, label, extra=' text-anchor="middle"')


def _legend(place: int, entries: Sequence[tuple[str, str, str]]) -> Iterable[str]:
    """Below a panel, two beside each other if they are short: (name, colour, dashes)."""
    num_columns = 2 if max(len(name) for name, _, _ in entries) <= _SHORT_NAME else 1
    for index, (name, colour, dashes) in enumerate(entries):
        x = _panel_left(place) + index % num_columns * _WIDTH / 2
        y = _TOP + _HEIGHT + 42 + index // num_columns * 18
        yield f'<path d="M{x:.0f},{y - 4}h18" stroke="{colour}" stroke-dasharray="{dashes}"/>'
        yield _text(x + 24, y, name)


def _values(servers: Mapping[str, Rows], *keys: str) -> list[float]:
    return [row[key] for rows in servers.values() for row in rows for key in keys]


def _panel_left(place: int) -> int:
    return _LEFT + place * (_WIDTH + _GAP)


def _text(x: float, y: float, text: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(text)}</text>'
