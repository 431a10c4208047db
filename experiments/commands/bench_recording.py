"""`dayshift bench record` and `dayshift bench export`: recorder and export on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.yaml_tree import ConfigError

if TYPE_CHECKING:
    from dayshift.dataset_export.fresh_process import WriterSpeed
    from dayshift.dataset_export.recorder_speed import EpisodesRow, WaitRow
    from dayshift.dataset_export.run_folder import RecordedAttempt

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run: its frames are used.")]

_NUM_LOADED = 4  # attempts held in memory, decoded


def export(
    run_dir: RunDir,
    sizes: Annotated[str, typer.Option(help="Widths of the pictures, with commas.")] = "128,256",
    max_frames: Annotated[
        int, typer.Option(min=1, help="Take the shortest attempts, up to so many frames.")
    ] = 450,
    as_json: AsJson = False,
) -> None:
    """Time our export beside lerobot's writer in each of its modes, on the same attempts."""
    from dayshift.dataset_export.fresh_process import measure_writers

    if not all(size.isdigit() for size in sizes.split(",")):
        raise ConfigError(f"--sizes: found {sizes}, allowed: numbers with commas, as 128,256")
    with stdout_kept_for_json() as print_json:
        rows = measure_writers(run_dir, [int(size) for size in sizes.split(",")], max_frames)
        if as_json:
            print_json({"rows": msgspec.to_builtins(rows)})
    if not as_json:
        print_writers(Console(), rows)


def print_writers(console: Console, rows: Sequence[WriterSpeed]) -> None:
    """Frame pairs per second, writer by writer."""
    table = Table("pictures", "writer", "frame pairs/s", "ours is faster by")
    ours = {row.image_size: row.frame_pairs_per_s for row in rows if row.writer == "ours"}
    for row in rows:
        faster = "" if row.writer == "ours" else f"{ours[row.image_size] / row.frame_pairs_per_s:.0f} x"
        table.add_row(f"{row.image_size} px", row.writer, f"{row.frame_pairs_per_s:,.0f}", faster)
    console.print(table)


def record(
    run_dir: RunDir,
    robots: Annotated[int, typer.Option(min=1, help="Robots that record at a time.")] = 8,
    pairs_per_s: Annotated[
        float, typer.Option(min=1, help="Frames with two pictures, per second in all.")
    ] = 60.0,
    duration_s: Annotated[float, typer.Option(min=1, help="Seconds for each of the two rates.")] = 15.0,
    episodes: Annotated[int, typer.Option(min=1, help="Short episodes in a row.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """Measure how long robots wait for the recorder, and whether it stays as fast episode after episode."""
    from dayshift.dataset_export.dense_video import missing_cameras
    from dayshift.dataset_export.recorder_speed import load_frames, measure_episodes, measure_waits
    from dayshift.dataset_export.run_folder import open_run
    from dayshift.sim.types import CAMERAS

    def has_pictures(attempt: RecordedAttempt) -> bool:
        return not missing_cameras(attempt, CAMERAS)

    with open_run(run_dir) as run:
        attempts = [
            load_frames(one) for one in list(filter(has_pictures, run.recorded_attempts()))[:_NUM_LOADED]
        ]
    if not attempts:
        raise ConfigError(f"{run_dir}: found no attempt with all its pictures; dayshift prerender makes them")
    with stdout_kept_for_json() as print_json, tempfile.TemporaryDirectory(dir=run_dir) as scratch:
        waits = [
            measure_waits(
                Path(scratch) / f"waits-{rate}",
                attempts,
                num_robots=robots,
                pairs_per_s=rate,
                duration_s=duration_s,
            )
            for rate in (pairs_per_s, None)
        ]
        flat = list(
            measure_episodes(
                Path(scratch) / "episodes",
                attempts[0],
                num_episodes=episodes,
                rows_of=max(1, episodes // 10),
                num_frames=20,
            )
        )
        if as_json:
            print_json({"waits": list(map(asdict, waits)), "episodes": list(map(asdict, flat))})
    if not as_json:
        _print_recorder(waits, flat)


def _print_recorder(waits: Sequence[WaitRow], flat: Sequence[EpisodesRow]) -> None:
    table = Table(
        "robots", "frame pairs/s", "frames", "p50 ms", "p99 ms", "longest ms", "found it full", "written"
    )
    for row in waits:
        table.add_row(
            str(row.num_robots),
            f"{row.pairs_per_s:.0f}",
            str(row.num_frames),
            f"{row.p50_ms:.2f}",
            f"{row.p99_ms:.2f}",
            f"{row.longest_ms:.1f}",
            f"{row.num_waits} times, {row.waited_s:.1f} s",
            str(row.num_written),
        )
    Console().print(table)
    table = Table("episodes", "frame pairs/s", "memory of the writer, MiB")
    for row in flat:
        table.add_row(f"{row.first}-{row.last}", f"{row.frames_per_s:.0f}", f"{row.rss_mb:.0f}")
    Console().print(table)
