"""Exports again and again, killed at random moments: python export_until_killed.py FOLDER NUM_KILLS SEED

After each kill the dataset must be the one of before or the new one, whole; then a new attempt is
recorded and the export goes on. Prints how often which was the case.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from recording_samples import Try, add_try, make_run

from dayshift.dataset_export.dataset_draft import FileSizes
from dayshift.dataset_export.dataset_files import read_meta
from dayshift.dataset_export.export import ExportOptions, export_dataset
from dayshift.dataset_export.recorder import Recorder
from dayshift.dataset_export.store import RunStore, database_url
from dayshift.dataset_export.verify import check_dataset


def export_in_child(run_dir: Path, dataset: Path) -> int:
    """Fork (imports take seconds, an export milliseconds) and export there."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            export_dataset([run_dir], dataset, ExportOptions(append=True, sizes=FileSizes(data_file_mb=0.01)))
            status = 0
        finally:
            os._exit(status)
    return child


def main() -> None:
    folder, num_kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    run_dir, dataset = make_run(folder / "run-1", image_size=32), folder / "ds"
    started = time.perf_counter()
    export_dataset([run_dir], folder / "undisturbed")
    duration_s = time.perf_counter() - started
    num_attempts, outcomes = 5, Counter[str]()
    with RunStore(database_url(run_dir), run_dir.name) as store, Recorder(run_dir) as recorder:
        for _ in range(num_kills):
            before = read_meta(dataset).info.total_episodes if dataset.exists() else 0
            child = export_in_child(run_dir, dataset)
            time.sleep(rng.uniform(0.0, 1.3 * duration_s))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

            after = read_meta(dataset).info.total_episodes if dataset.exists() else 0
            assert after in (before, num_attempts), (before, after, num_attempts)
            if after:
                assert check_dataset(dataset).problems == ()
            outcomes["nothing yet" if not after else "old" if after < num_attempts else "new"] += 1
            if after == num_attempts:
                num_attempts += 1
                add_try(
                    store, recorder, Try(key=(9, 1, num_attempts), num_frames=8), num_attempts, image_size=32
                )
    export_dataset([run_dir], dataset, ExportOptions(append=True))
    assert read_meta(dataset).info.total_episodes == num_attempts
    assert check_dataset(dataset).problems == ()
    print(dict(outcomes))


if __name__ == "__main__":
    main()
