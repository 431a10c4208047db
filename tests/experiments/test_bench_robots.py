"""The curve of robots: what the command prints is what the plot draws."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from dayshift.experiments.robots_plot import draw_robots

SVG = "{http://www.w3.org/2000/svg}"


def row(num_robots: int, **fields: object) -> dict[str, object]:
    sources = {"gpu": 0.5, "host": 0.3, "disk": 0.1, "recomputed": 0.1}
    waits = {"p50_s": 0.4, "p95_s": 1.2}
    return {"num_robots": num_robots, "calls_per_s": num_robots / 5, "sources": sources} | waits | fields


def test_the_command_prints_what_the_plot_draws(dayshift, tmp_path) -> None:
    ended = dayshift(
        "bench", "robots", "--model", "default", "--robots", "1,3", "--duration", "2", "--think", "0.2",
        "--window", "256", "--history", "200", "--system-tokens", "30", "--new-tokens", "10",
        "--generated-tokens", "2", "--kv-cache-gib", "0.02", "--host-kv-gib", "0.01", "--json",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert [found["num_robots"] for found in report["servers"]["dayshift"]] == [1, 3]
    assert report["load"]["window"] == 256
    (tmp_path / "robots.json").write_text(ended.stdout)
    ended = dayshift("bench", "robots-plot", "robots.json", "--to", "robots.svg")
    assert ended.returncode == 0, ended.stderr
    assert ET.parse(tmp_path / "robots.svg").getroot().tag == f"{SVG}svg"


def test_all_is_drawn_inside_the_picture() -> None:
    servers = {"dayshift": [row(20), row(400, p95_s=30.0)], "peer <a>": [row(20, sources=None, p50_s=17.0)]}
    root = ET.fromstring(draw_robots(servers))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    bars = [bar for bar in root.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    assert len(bars) == 2 * 4
    assert sum(float(bar.attrib["height"]) for bar in bars) == pytest.approx(2 * 240, abs=1)
    for place in (*root.iter(f"{SVG}circle"), *root.iter(f"{SVG}text")):
        x, y = (float(place.get(name) or place.get(f"c{name}") or "nan") for name in "xy")
        assert 0 <= x <= width
        assert 0 <= y <= height
    assert "peer <a>, median" in {text.text for text in root.iter(f"{SVG}text")}


def test_what_is_no_result_is_one_line(dayshift, tmp_path) -> None:
    (tmp_path / "x.json").write_text("{}")
    ended = dayshift("bench", "robots-plot", "x.json", "--to", "x.svg")
    assert ended.returncode == 1
    assert ended.stderr.startswith("dayshift: x.json: not what `dayshift bench robots --json` prints")
    assert ended.stderr.count("\n") == 1
