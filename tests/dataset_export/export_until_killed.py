"""Exports, killed at random moments: export_until_killed.main(FOLDER, NUM_KILLS, SEED)

After each kill the dataset must be the one of before or the new one, whole; then a new attempt is
recorded and the export goes on. In every second run most pictures still have to be rendered. Every
`KILLS_PER_RUN` kills a new run begins.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from recording_samples import PaintedRenderer, Try, add_try, make_run

from dayshift.dataset_export.dataset_draft import FileSizes
from dayshift.dataset_export.dataset_files import read_meta, staging_folder
from dayshift.dataset_export.export import ExportOptions, ExportReport, export_dataset
from dayshift.dataset_export.recorder import Recorder
from dayshift.dataset_export.store import RunStore, database_url
from dayshift.dataset_export.verify import check_dataset

KILLS_PER_RUN = 25


def main(folder: Path, num_kills: int, seed: int) -> None:
    counts = Counter[str]()
    for number, first in enumerate(range(0, num_kills, KILLS_PER_RUN)):
        last = min(first + KILLS_PER_RUN, num_kills)
        rng = random.Random(seed + first)
        export_and_kill(
            folder / f"{first}", last - first, rng, counts, images_every=1 if number % 2 == 0 else 4
        )
        print(f"export: {last} of {num_kills} kills, {dict(counts)}", flush=True)


def export_and_kill(
    folder: Path, num_kills: int, rng: random.Random, counts: Counter[str], *, images_every: int
) -> None:
    run_dir = make_run(folder / "run-1", images_every=images_every, image_size=32)
    dataset = folder / "ds"
    undisturbed = make_run(folder / "undisturbed", images_every=images_every, image_size=32)
    for name in ("warm", "timed"):
        for rendered in undisturbed.glob("attempts/*/*.dense.*"):
            rendered.unlink()
        started = time.perf_counter()
        export(undisturbed, folder / name)
    duration_s = time.perf_counter() - started
    num_attempts = 5
    with RunStore(database_url(run_dir), run_dir.name) as store, Recorder(run_dir) as recorder:
        for _ in range(num_kills):
            before = read_meta(dataset).info.total_episodes if dataset.exists() else 0
            child = export_in_child(run_dir, dataset)
            time.sleep(rng.uniform(0.0, 2.0 * duration_s))
            how = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
            os.kill(child, how)
            os.waitpid(child, 0)

            after = read_meta(dataset).info.total_episodes if dataset.exists() else 0
            assert after in (before, num_attempts), (before, after, num_attempts)
            if after:
                assert check_dataset(dataset).problems == ()
            state = "nothing yet" if not after else "old" if after < num_attempts else "new"
            counts[f"{how.name}: {state}"] += 1
            if after == num_attempts:
                num_attempts += 1
                one = Try(key=(9, 1, num_attempts), num_frames=8)
                add_try(store, recorder, one, num_attempts, images_every=images_every, image_size=32)
    report = export(run_dir, dataset)
    assert report.skipped == ()
    assert read_meta(dataset).info.total_episodes == num_attempts
    assert check_dataset(dataset).problems == ()
    assert not staging_folder(dataset).exists()


def export_in_child(run_dir: Path, dataset: Path) -> int:
    """Fork (imports take seconds, an export milliseconds) and export there."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            export(run_dir, dataset)
            status = 0
        finally:
            os._exit(status)
    return child


def export(run_dir: Path, dataset: Path) -> ExportReport:
    options = ExportOptions(append=True, sizes=FileSizes(data_file_mb=0.01, video_file_mb=0.02))
    return export_dataset([run_dir], dataset, options, make_renderer=PaintedRenderer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
