"""`dayshift export`, `dayshift verify`, `dayshift repair`: datasets from what was recorded."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.folders import RunFolder, open_run_folders
from dayshift.experiments.yaml_tree import ConfigError
from dayshift.types import DayshiftError, Outcome

if TYPE_CHECKING:
    from dayshift.dataset_export.repair import RunRepair
    from dayshift.dataset_export.verify import VerifyReport
    from dayshift.dataset_export.video import Codec
    from dayshift.sim.types import Camera

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def export(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs.")],
    to: Annotated[Path, typer.Option(help="Folder of the dataset.")],
    only: Annotated[
        list[Outcome] | None, typer.Option(help="Attempts that ended so; may be given again.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(metavar="SQL", help="Attempts with this: \"outcome == 'failed'\"."),
    ] = None,
    cameras: Annotated[str, typer.Option(help="With commas; none: no pictures.")] = "agentview,wrist",
    codec: Annotated[str, typer.Option(help="h264, or av1: rendered and encoded anew.")] = "h264",
    language: Annotated[bool, typer.Option(help="With the planner's talk.")] = True,
    append: Annotated[bool, typer.Option("--append", help="Add to a dataset that is there.")] = False,
    same_shards: Annotated[
        bool, typer.Option("--same-shards", help="Rows and all cameras change files together.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Write runs as a LeRobot v3.0 dataset; exit code 1 when an attempt could not be exported."""
    from dayshift.dataset_export.dataset_draft import FileSizes
    from dayshift.dataset_export.export import ROBOT_OUTCOMES, ExportOptions, export_dataset
    from dayshift.dataset_export.run_folder import open_run

    options = ExportOptions(
        only=tuple(only) if only else ROBOT_OUTCOMES,
        where=where,
        cameras=chosen_cameras(cameras),
        codec=chosen_codec(codec),
        language=language,
        append=append,
        sizes=FileSizes(together=same_shards),
    )
    folders: dict[Path, RunFolder] = {run.path: run for path in runs for run in open_run_folders(path)}
    with stdout_kept_for_json() as print_json, progress_bar() as progress:
        bar = progress.add_task("attempts", total=None)
        report = export_dataset(
            list(folders),
            to,
            options,
            open_folder=lambda path: open_run(path, database=folders[path].arm.experiment.record.database),
            on_progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
        if as_json:
            print_json(asdict(report) | {"dataset": str(report.dataset)})
    if not as_json:
        print(
            f"{report.dataset}: {report.num_added} episodes added ({report.num_frames} frames, "
            f"{report.num_rendered} rendered), {report.num_present} were there"
        )
    for skipped in report.skipped:
        print(f"dayshift: attempt {skipped.attempt_id} not exported: {skipped.reason}", file=sys.stderr)
    return 1 if report.skipped else 0


def verify(
    datasets: Annotated[list[Path], typer.Argument(metavar="DIR...", help="LeRobot v3.0 datasets.")],
    lerobot: Annotated[bool, typer.Option(help="Also load them with lerobot, in a fresh process.")] = True,
    as_json: AsJson = False,
) -> int:
    """Check datasets, file by file; exit code 1 when something is wrong."""
    from dayshift.dataset_export.fresh_process import LeRobotReport, verify_with_lerobot

    with stdout_kept_for_json() as print_json:
        own = {dataset: _check(dataset) for dataset in datasets}
        whole = [dataset for dataset, report in own.items() if report.is_whole] if lerobot else []
        loaded = dict(zip(whole, verify_with_lerobot(whole), strict=True)) if whole else {}
        bodies = []
        for dataset, report in own.items():
            by_lerobot = loaded.get(dataset, LeRobotReport(num_items=0, problems=[], notes=[]))
            problems = [str(problem) for problem in (*report.problems, *by_lerobot.problems)]
            bodies.append(
                {
                    "dataset": str(dataset),
                    "ok": not problems,
                    "episodes": report.num_episodes,
                    "frames": report.num_frames,
                    "pictures": report.num_pictures,
                    "hashes_compared": report.num_digests,
                    "items_from_lerobot": by_lerobot.num_items,
                    "problems": problems,
                    "notes": by_lerobot.notes,
                }
            )
        is_ok = all(body["ok"] for body in bodies)
        if as_json:
            print_json({"ok": is_ok, "datasets": bodies})
    if not as_json:
        for body in bodies:
            _print_verified(body)
    return 0 if is_ok else 1


def _check(dataset: Path) -> VerifyReport:
    """Our own checks; what is no dataset is a problem among those of the others."""
    from dayshift.dataset_export.verify import Problem, VerifyReport, check_dataset

    try:
        return check_dataset(dataset)
    except DayshiftError as error:
        problem = Problem(where="dataset", what=str(error))
        return VerifyReport(num_episodes=0, num_frames=0, num_pictures=0, num_digests=0, problems=(problem,))


def _print_verified(body: dict[str, Any]) -> None:
    for line in [*body["problems"], *(f"note: {note}" for note in body["notes"])]:
        print(f"{body['dataset']}: {line}")
    state = "whole" if body["ok"] else f"{len(body['problems'])} problems"
    print(
        f"{body['dataset']}: {state}; {body['episodes']} episodes, {body['frames']} frames, "
        f"{body['pictures']} pictures; compared: {body['hashes_compared']} hashes, "
        f"{body['items_from_lerobot']} items from lerobot"
    )


def repair(
    paths: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs, or datasets.")],
    as_json: AsJson = False,
) -> int:
    """Clear away what a killed run was recording; make a damaged dataset whole without what is lost.

    Exit code 1 when files of finished attempts are missing, or episodes had to be dropped.
    """
    from dayshift.dataset_export.lerobot_v3 import INFO
    from dayshift.dataset_export.repair_dataset import repair_dataset

    found: dict[str, Any] = {}
    has_losses = False
    with stdout_kept_for_json() as print_json:
        for path in paths:
            if (path / INFO).is_file():
                dataset = repair_dataset(path)
                found[str(path)] = dataset
                has_losses |= bool(dataset.dropped)
                continue
            for run in open_run_folders(path):
                repaired = _repair_run(run)
                found[str(run.path)] = repaired
                has_losses |= bool(repaired.missing)
        if as_json:
            print_json({path: asdict(repaired) for path, repaired in found.items()})
    if not as_json:
        for path, repaired in found.items():
            print(f"{path}: {repaired}")
    return 1 if has_losses else 0


def _repair_run(run: RunFolder) -> RunRepair:
    from dayshift.dataset_export.repair import repair_run
    from dayshift.dataset_export.store import open_records

    with open_records(run.path, run.arm.experiment.record.database) as store:
        return repair_run(run.path, store)


def chosen_cameras(text: str) -> tuple[Camera, ...]:
    """The cameras of an option. Raises ConfigError for one that there is not."""
    from dayshift.sim.types import CAMERAS

    chosen = tuple(name for name in text.split(",") if name not in ("", "none"))
    if unknown := sorted(set(chosen) - set(CAMERAS)):
        raise ConfigError(f"--cameras: found {', '.join(unknown)}, allowed: {', '.join(CAMERAS)}, none")
    return chosen


def chosen_codec(name: str) -> Codec:
    """The codec of an option. Raises ConfigError for an unknown one."""
    from dayshift.dataset_export.video import CODECS

    if name not in CODECS:
        raise ConfigError(f"--codec: found {name}, allowed: {', '.join(CODECS)}")
    return CODECS[name]


def progress_bar() -> Progress:
    """The bar of commands that go through attempts."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))
