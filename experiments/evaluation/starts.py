"""Which tasks and initial states a run has met, for policies that shall meet them again."""

from __future__ import annotations

from pathlib import Path

from dayshift.dataset_export.run_folder import open_run
from dayshift.experiments.folders import open_run_folders
from dayshift.experiments.yaml_tree import ConfigError
from dayshift.sim.tasks import find_task


def starts_of_run(run: Path, suite: str) -> tuple[tuple[int, int], ...]:
    """(number of the task in `suite`, initial state) of every attempt of a run, each once, in order.

    Raises ConfigError if the run has none, or one of another suite; DayshiftError if it is no run.
    """
    starts: set[tuple[int, int]] = set()
    for folder in open_run_folders(run):
        with open_run(folder.path, database=folder.arm.experiment.record.database) as recorded_run:
            for recorded in recorded_run.recorded_attempts():
                spec = recorded.start().spec
                task = find_task(spec.task)
                if task.suite != suite:
                    raise ConfigError(f"--as-in: {run} has attempts of {task.suite}, allowed: of {suite}")
                starts.add((task.index, spec.init_state_id))
    if not starts:
        raise ConfigError(f"--as-in: {run} has no recorded attempts")
    return tuple(sorted(starts))
