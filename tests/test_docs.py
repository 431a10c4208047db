"""What the documentation says can be typed: command lines, HTTP calls, links and Make targets."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.core import TyperGroup

from dayshift.engine.config import EngineConfig
from dayshift.engine.server.run import ServerOptions, running_server
from dayshift.experiments.commands.app import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PLANNER_WEIGHTS = ROOT / "planner" / "weights"


def code_lines(page: Path) -> Iterator[str]:
    """Lines of indented code, without the explanation behind them."""
    for line in page.read_text().splitlines():
        if line.startswith("    ") and line.strip():
            yield re.split(r"\s{2,}|\s#\s", line.strip())[0]


COMMAND_TABLE = vars(typer.main.get_command(app))["commands"]
COMMANDS = sorted({line for page in PAGES for line in code_lines(page) if line.startswith("dayshift ")})
CURLS = [line for line in code_lines(ROOT / "README.md") if line.startswith("curl ")]


@pytest.mark.parametrize("line", COMMANDS)
def test_command_is_understood(line: str) -> None:
    name, *arguments = shlex.split(line)[1:]
    assert name in COMMAND_TABLE, f"there is no command dayshift {name}"
    command = COMMAND_TABLE[name]
    while isinstance(command, TyperGroup):
        name, *arguments = arguments
        assert name in command.commands, f"{line}: there is no {name}"
        command = command.commands[name]
    context = command.context_class(command, info_name=name)
    command.make_parser(context).parse_args(arguments)  # raises for an unknown option


def options_of(command: Any) -> Iterator[str]:
    """The options of a command, or of all commands of a group."""
    if isinstance(command, TyperGroup):
        for member in command.commands.values():
            yield from options_of(member)
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)


def options_of_modules(text: str) -> Iterator[str]:
    """The options of the folders and modules that `text` runs by `python -m`, as their sources name them."""
    for name in re.findall(r"python -m (?:dayshift\.)?([\w.]+)", text):
        place = ROOT.joinpath(*name.split("."))
        for source in place.glob("*.py") if place.is_dir() else [place.with_suffix(".py")]:
            for option in re.findall(r'"--([a-z-]+)"', source.read_text(encoding="utf-8")):
                yield from (f"--{option}", f"--no-{option}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_in_sentences_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    known = {*options_of(typer.main.get_command(app)), *options_of_modules(text)}
    spans = [span for span in re.findall(r"`([^`\n]+)`", text) if not span.startswith("pytest ")]
    named = {option for span in spans for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", span)}
    assert named <= known, f"{page.name} names options that no command has: {sorted(named - known)}"


def test_there_are_commands_and_calls_to_check() -> None:
    assert len(COMMANDS) > 8
    assert len(CURLS) == 2


def test_http_calls_of_the_readme_work() -> None:
    config = EngineConfig(model=str(PLANNER_WEIGHTS), kv_cache_bytes=64 << 20, device="cpu")
    with running_server(config, ServerOptions(port=0, in_process=True)) as url:
        for line in CURLS:
            path = re.search(r"localhost:8000(\S+)", line)
            body = re.search(r"-d '(.*?)'", line)
            assert path is not None
            assert body is not None
            reply = httpx.post(url + path[1], json=json.loads(body[1]), timeout=60)
            assert reply.is_success, reply.text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"(?:^    |`)make ([a-z-]+)", page.read_text(), re.M):
            assert re.search(rf"^{target}:", makefile, re.M), f"{page.name}: make {target}"
