"""Records as a run does, killed at random moments: record_until_killed.main(FOLDER, NUM_KILLS, SEED)

Forks for every kill (imports take seconds, recording milliseconds). After each kill the run is repaired as
its next start would, and what was committed must be there, whole; at most the attempt in flight is lost.
Every `KILLS_PER_RUN` kills the run is exported and a new one begins.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from recording_samples import (
    attempt_row,
    make_frames,
    make_spec,
    make_start,
    recording_row,
    robot_row,
    run_row,
)

from dayshift.dataset_export.export import export_dataset
from dayshift.dataset_export.repair import repair_run
from dayshift.dataset_export.run_folder import open_run
from dayshift.dataset_export.store import RunStore, database_url
from dayshift.dataset_export.tables import AttemptRow
from dayshift.dataset_export.verify import check_dataset
from dayshift.dataset_export.writer_process import RecorderProcess

KILLS_PER_RUN = 25


def main(folder: Path, num_kills: int, seed: int) -> None:
    counts = Counter[str]()
    for first in range(0, num_kills, KILLS_PER_RUN):
        run_dir = folder / f"run-{first}"
        run_dir.mkdir(parents=True)
        told: list[str] = []
        last = min(first + KILLS_PER_RUN, num_kills)
        for number in range(first, last):
            told += record_and_kill(run_dir, random.Random(seed + number), counts)
            repair_and_check(run_dir, told, counts)
        if told:
            report = export_dataset([run_dir], folder / "ds" / run_dir.name)
            assert report.skipped == ()
            assert report.num_added >= len(told)
            assert check_dataset(folder / "ds" / run_dir.name).problems == ()
        counts["attempts kept"] += len(told)
        print(f"recording: {last} of {num_kills} kills, {dict(counts)}", flush=True)


def record_and_kill(run_dir: Path, rng: random.Random, counts: Counter[str]) -> list[str]:
    """Kill the run, or only its parent process, at a random moment; return what it had committed."""
    committed, committed_in = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            committed.close()
            record(run_dir, rng, committed_in)
        except BaseException:  # noqa: BLE001  the parent wants to read it
            traceback.print_exc()
        finally:
            os._exit(1)  # it never ends by itself
    committed_in.close()
    num_commits = rng.choice([0, 0, 1, 1, 2])
    told = [committed.recv() for _ in range(num_commits)]
    time.sleep(rng.uniform(0.0, 0.3 if num_commits else 1.0))
    if rng.random() < 0.5:
        os.killpg(child, signal.SIGKILL)
        counts["run and writer killed"] += 1
    else:
        os.kill(child, signal.SIGKILL)  # the writer finds itself alone
        counts["run killed"] += 1
    os.waitpid(child, 0)
    try:
        while True:
            told.append(committed.recv())
    except EOFError:
        return told


def record(run_dir: Path, rng: random.Random, committed: Connection) -> None:
    """What a run does from its start on."""
    with RunStore(database_url(run_dir), run_dir.name) as store:
        repair_run(run_dir, store)
        store.save(run_row(run_dir.name), robot_row(run_dir.name, "robot-0"))
        num_attempts = len(store.rows(AttemptRow))
        with RecorderProcess(run_dir, now=time.monotonic) as recorder:
            while True:
                num_attempts += 1
                attempt_id = f"robot-0-1.1.{num_attempts}-w1"
                frames = make_frames(rng.randrange(1, 90), images_every=1, image_size=32, seed=num_attempts)
                with recorder.attempt(attempt_id) as attempt:
                    attempt.on_start(make_spec(image_size=32), make_start())
                    for frame in frames:
                        attempt.on_frame(frame)
                    recording = attempt.finish()
                store.save(recording_row(run_dir.name, recording))
                store.save(attempt_row(run_dir.name, attempt_id, num_control_steps=len(frames)))
                committed.send(attempt_id)


def repair_and_check(run_dir: Path, told: list[str], counts: Counter[str]) -> None:
    with RunStore(database_url(run_dir), run_dir.name) as store:
        repair = repair_run(run_dir, store)
        assert repair.missing == ()
        assert len(repair.removed) <= 1, repair
        counts["attempts in flight lost"] += len(repair.removed)
        assert str(repair_run(run_dir, store)) == "nothing to repair"
        ids = [row.attempt_id for row in store.rows(AttemptRow)]
    # Everything that was told to be committed is there; at most one commit was not told any more.
    assert set(told) <= set(ids)
    assert sorted(path.name for path in run_dir.glob("attempts/*")) == sorted(ids)
    if not ids:
        return
    with open_run(run_dir) as run:
        for attempt in run.recorded_attempts():
            frames = attempt.frames()
            assert len(frames) == attempt.attempt.num_control_steps == attempt.recording.num_frames
            assert attempt.start().spec.init_state_id == attempt.recording.init_state_id
            for camera in attempt.cameras:
                with attempt.video(camera) as video:
                    assert video.frame_indices == list(range(len(frames)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
