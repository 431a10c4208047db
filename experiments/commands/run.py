"""`dayshift run`: runs an experiment, or goes on with one."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.errors import traceback_kept_in
from dayshift.experiments.folders import RunFolder, create_run_folders, open_run_folders
from dayshift.experiments.loading import Arm, load_arms
from dayshift.experiments.yaml_tree import ConfigError


def run(
    file: Annotated[
        Path | None,
        typer.Argument(help="A YAML file, or the name of an experiment that comes with Dayshift."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a value of the file.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run, and where each value came from.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Go on with a run that was interrupted.")
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where the run's folder is made.")] = Path("runs"),
    with_page: Annotated[
        bool, typer.Option("--ui", help="Serve the live page, and print its address.")
    ] = False,
    ui_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: any free one.")] = 0,
    keep_ui: Annotated[
        bool | None,
        typer.Option(
            "--keep-ui/--no-keep-ui",
            help="Whether the page stays after the run, until Ctrl-C.",
            show_default="in a terminal",
        ),
    ] = None,
) -> None:
    """Run an experiment: shifts, then a review of each from memory."""
    if (file is None) == (resume is None):
        found = "both" if file else "neither"
        raise ConfigError(f"run: found {found}, allowed: an experiment's file, or --resume RUN_DIR")
    if resume and (settings or dry_run):
        raise ConfigError(
            "--resume: a run goes on with its own configuration; --set and --dry-run have no effect"
        )
    if keep_ui is not None and not with_page:
        raise ConfigError("--keep-ui, --no-keep-ui: there is no page to keep; allowed with --ui")
    if file and dry_run:
        _show(load_arms(file, settings or ()), as_json)
        return
    if resume:
        folder, runs = resume, open_run_folders(resume)
    else:
        assert file is not None
        folder, runs = create_run_folders(runs_dir, load_arms(file, settings or ()))
    if not with_page:
        _run(folder, runs, as_json)
        return
    from dayshift.experiments.page import PageProcess

    with PageProcess(folder.parent.resolve(), port=ui_port) as page:
        place = f"#run={folder.name}" if len(runs) == 1 else ""
        typer.echo(f"the page is at {page.address}{place}", err=True)
        _run(folder, runs, as_json)
        if sys.stderr.isatty() if keep_ui is None else keep_ui:
            typer.echo(f"the run is over; the page stays at {page.address} until Ctrl-C", err=True)
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
    typer.echo(f"look at it again: dayshift ui {folder}", err=True)


def _run(folder: Path, runs: Sequence[RunFolder], as_json: bool) -> None:
    """Runs them, and prints the results at the end."""
    from dayshift.experiments.engines import Engines
    from dayshift.experiments.results import pool_seeds, print_table
    from dayshift.experiments.runner import run_all

    with stdout_kept_for_json() as print_json:
        with traceback_kept_in(folder), Engines(folder / "engine") as engines:
            results = run_all(runs, engines)
        if as_json:
            pooled = pool_seeds(runs, results)
            several = {"run_dir": str(folder), "runs": results, "pooled": pooled}
            print_json(results[0] if len(results) == 1 else several)
    if not as_json:
        print_table(runs, results)


def _show(arms: tuple[Arm, ...], as_json: bool) -> None:
    """The dry run: resolved configurations, as YAML with origins or as JSON."""
    if as_json:
        with stdout_kept_for_json() as print_json:
            print_json({"runs": [_as_json(arm) for arm in arms]})
        return
    for number, arm in enumerate(arms, 1):
        if arm.label:
            sys.stdout.write(f"# run {number} of {len(arms)}: {arm.label}\n---\n")
        sys.stdout.write(arm.annotated())


def _as_json(arm: Arm) -> dict[str, Any]:
    return {"label": arm.label, "config": arm.experiment.resolved(), "origins": arm.origins()}
