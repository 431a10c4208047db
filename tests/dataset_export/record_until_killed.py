"""Records attempts as a run does, until somebody kills it: python record_until_killed.py RUN_DIR SEED

Prints a line `committed <attempt_id>` after each attempt whose outcome is durable.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from recording_samples import attempt_row, make_frames, make_spec, make_start, recording_row, run_row

from dayshift.dataset_export.repair import repair_run
from dayshift.dataset_export.store import RunStore, database_url
from dayshift.dataset_export.writer_process import RecorderProcess


def main() -> None:
    run_dir, seed = Path(sys.argv[1]), int(sys.argv[2])
    rng = np.random.default_rng(seed)
    with RunStore(database_url(run_dir), run_dir.name) as store:
        print("repaired", repair_run(run_dir, store), flush=True)
        store.save(run_row(run_dir.name))
        num_attempts = len(store.rows(type(attempt_row("", ""))))
        with RecorderProcess(run_dir, now=time.monotonic) as recorder:
            print("recording", flush=True)
            while True:
                num_attempts += 1
                attempt_id = f"robot-0-1.1.{num_attempts}-w1"
                frames = make_frames(int(rng.integers(1, 90)), images_every=3, seed=num_attempts)
                with recorder.attempt(attempt_id) as attempt:
                    attempt.on_start(make_spec(), make_start())
                    for frame in frames:
                        attempt.on_frame(frame)
                    recording = attempt.finish()
                store.save(recording_row(run_dir.name, recording))
                store.save(attempt_row(run_dir.name, attempt_id, num_control_steps=len(frames)))
                print("committed", attempt_id, flush=True)


if __name__ == "__main__":
    main()
