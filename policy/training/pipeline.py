"""From nothing to an evaluated policy; a step whose result is there is not done again.

FOLDER/vlm          tokenizer and sizes
FOLDER/dataset      demonstrations, a LeRobot v3.0 image dataset
FOLDER/training     lerobot's output
FOLDER/checkpoint   the policy, complete in itself
FOLDER/evaluation   `dayshift eval` on the held-out initial states
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

from dayshift.policy.training.demonstrations import NUM_TRAINING_STATES, record, write_dataset
from dayshift.policy.training.train import TrainingOptions, assemble, train
from dayshift.policy.training.vlm import IMAGE_SIDE, write_vlm
from dayshift.sim.tasks import find_task, list_tasks


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", nargs="*", help="names, sentences or numbers; default: all of LIBERO-Goal")
    parser.add_argument("--episodes", type=int, default=80, help="demonstrations per task")
    parser.add_argument("--steps", type=int, default=30_000, help="of training")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=4, help="that read data while training")
    parser.add_argument("--parallel", type=int, default=2, help="simulators")
    parser.add_argument("--device", default="cuda", help="for training: cuda or cpu")
    parser.add_argument(
        "--trials", type=int, default=10, help="per task, on held-out states; 0: no evaluation"
    )
    parser.add_argument("--max-steps", type=int, default=300, help="of an evaluation's episode")
    args = parser.parse_args()
    console = Console(stderr=True)
    folder: Path = args.folder.resolve()  # lerobot writes it into the checkpoint
    tasks = [find_task(task) for task in args.tasks] if args.tasks else list(list_tasks())

    vlm, dataset, checkpoint = folder / "vlm", folder / "dataset", folder / "checkpoint"
    if not (vlm / "config.json").is_file():
        write_vlm(vlm, [task.sentence for task in list_tasks()])
    if not (dataset / "meta" / "info.json").is_file():
        demonstrations = record(
            tasks, num_episodes=args.episodes, image_size=IMAGE_SIDE, parallel=args.parallel
        )
        shown = track(demonstrations, "record", total=args.episodes * len(tasks), console=console)
        unfinished = folder / "dataset.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        num_episodes = write_dataset(iter(shown), unfinished, image_size=IMAGE_SIDE)
        unfinished.rename(dataset)
        console.print(f"{num_episodes} demonstrations")
    if not (checkpoint / "config.json").is_file():
        console.print("train with lerobot")
        options = TrainingOptions(
            num_steps=args.steps,
            batch_size=args.batch_size,
            num_workers=args.workers,
            device=args.device,
        )
        assemble(train(dataset, vlm, folder / "training", options), vlm, checkpoint)
    if args.trials:
        sys.exit(subprocess.call(_evaluation(checkpoint, folder / "evaluation", args, tasks)))


def _evaluation(checkpoint: Path, out: Path, args: argparse.Namespace, tasks: list) -> list[str]:
    command = [sys.executable, "-m", "dayshift", "eval", "--episodes"]
    if (out / "evaluation.json").is_file():
        return [*command, "--resume", str(out)]
    options = {
        "--policy": checkpoint,
        "--tasks": ",".join(str(task.index) for task in tasks),
        "--trials": args.trials,
        "--first-init-state": NUM_TRAINING_STATES,
        "--image-size": IMAGE_SIDE,
        "--max-steps": args.max_steps,
        "--parallel": args.parallel,
        "--out": out,
    }
    return [*command, *(str(word) for pair in options.items() for word in pair)]


if __name__ == "__main__":
    main()
