"""`dayshift prerender`: renders now what an export would have to render."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dayshift.experiments.commands.export import AsJson, chosen_cameras, chosen_codec, progress_bar
from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.folders import open_run_folders


def prerender(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs.")],
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what is being recorded, until the run is over.")
    ] = False,
    cameras: Annotated[str, typer.Option(help="With commas.")] = "agentview,wrist",
    codec: Annotated[str, typer.Option(help="h264 or av1: what the export will be.")] = "h264",
    as_json: AsJson = False,
) -> int:
    """Render missing camera frames from recorded states, at low priority; exit code 1 when some cannot be.

    May run while the run goes on, and be killed: it goes on where it was.
    """
    from dayshift.dataset_export.prerender import LOW_PRIORITY, PrerenderOptions, prerender
    from dayshift.dataset_export.run_folder import open_run

    options = PrerenderOptions(cameras=chosen_cameras(cameras), codec=chosen_codec(codec), follow=follow)
    os.nice(LOW_PRIORITY)
    reports = {}
    with stdout_kept_for_json() as print_json, progress_bar() as progress:
        for folder in [folder for path in runs for folder in open_run_folders(path)]:
            bar = progress.add_task(folder.path.name, total=None)
            with open_run(folder.path, database=folder.arm.experiment.record.database) as run:
                reports[str(folder.path)] = prerender(
                    run,
                    options,
                    on_progress=lambda done, total, bar=bar: progress.update(
                        bar, completed=done, total=total
                    ),
                )
        if as_json:
            print_json({path: asdict(report) for path, report in reports.items()})
    for path, report in reports.items():
        if not as_json:
            print(f"{path}: {report.num_rendered} attempts rendered, {report.num_present} were there")
        for attempt_id, reason in report.broken.items():
            print(f"dayshift: attempt {attempt_id} cannot be rendered: {reason}", file=sys.stderr)
    return 1 if any(report.broken for report in reports.values()) else 0
