"""`dayshift report`: the scores of runs again, from their records."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.folders import open_run_folders
from dayshift.experiments.yaml_tree import ConfigError


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Show the scores of one run, or of several side by side; also of a run that is going on."""
    from dayshift.experiments.results import pool_seeds, print_table, read_results

    with stdout_kept_for_json() as print_json:
        runs = [run for folder in run_dirs for run in open_run_folders(folder)]
        if again := [
            path for path, count in Counter(run.path.resolve() for run in runs).items() if count > 1
        ]:
            raise ConfigError(f"report: {again[0]} is named twice; allowed: each run once")
        results = [read_results(run) for run in runs]
        if as_json:
            print_json(
                results[0] if len(results) == 1 else {"runs": results, "pooled": pool_seeds(runs, results)}
            )
    if not as_json:
        print_table(runs, results)
