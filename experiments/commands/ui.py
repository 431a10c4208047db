"""`dayshift ui` and `dayshift render`: runs to look at, live or recorded, and as films."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.yaml_tree import ConfigError

DEFAULT_PORT = 8080


def ui(
    runs: Annotated[Path, typer.Argument(help="A folder of runs, or the folder of one run.")] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback need a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = DEFAULT_PORT,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the key that the page asks for.")
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Nothing can be started, stopped or asked.")
    ] = False,
) -> None:
    """Serve the live page: watch runs, replay them, start and stop them."""
    from dayshift.experiments.launcher import ProcessLauncher
    from dayshift.webui.app import PageOptions
    from dayshift.webui.records import has_records
    from dayshift.webui.server import serve

    runs = runs.resolve()
    is_run = has_records(runs)
    runs_dir, place = (runs.parent, f"#run={runs.name}") if is_run else (runs, "")
    runs_dir.mkdir(parents=True, exist_ok=True)
    options = PageOptions(
        runs_dir=runs_dir,
        launcher=ProcessLauncher(runs_dir),
        is_read_only=read_only,
        host=host,
        port=port,
        api_key=_api_key(api_key_env),
    )
    serve(options, on_ready=lambda address: typer.echo(f"the page is at {address}{place}", err=True))


def render(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.")],
    to: Annotated[Path, typer.Option("--output", "-o", help="The MP4 to write.")],
    speed: Annotated[float, typer.Option(help="Run seconds per second of film, in the operation.")] = 60.0,
    review_speed: Annotated[float, typer.Option(help="And in the reviews.")] = 20.0,
    robot: Annotated[str | None, typer.Option(help="Whose planner is shown; default: the first.")] = None,
    title: Annotated[str | None, typer.Option(help="Default: the experiment's name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Save a run as a film: cameras, planner, shift board and clock."""
    from dayshift.webui.film import FilmOptions, make_film

    options = FilmOptions(speed=speed, review_speed=review_speed, robot=robot, title=title)
    columns = (
        TextColumn("filming"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    with (
        stdout_kept_for_json() as print_json,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        bar = progress.add_task("film")

        def report(num_done: int, num_total: int) -> None:
            progress.update(bar, completed=num_done, total=num_total)

        film = make_film(run_dir, to, options, on_progress=report)
        if as_json:
            print_json({"film": str(to), "num_frames": film.num_frames, "duration_s": film.duration_s})
    if not as_json:
        typer.echo(f"{to}: {film.duration_s:.0f} s")


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise ConfigError(f"--api-key-env: the environment has no {variable}")
    return key
