"""From nothing to an evaluated policy; a step whose result is there is not done again.

FOLDER/demonstrations  one file per attempt of the expert
FOLDER/dataset         the successful ones, a LeRobot v3.0 dataset
FOLDER/vlm             tokenizer and sizes
FOLDER/training        lerobot's output
FOLDER/checkpoint      the policy, complete in itself
FOLDER/evaluation      `dayshift eval` on the held-out initial states
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from dayshift.policy.training.assemble import assemble
from dayshift.policy.training.dataset import open_dataset, write_recordings
from dayshift.policy.training.demonstrations import NUM_TRAINING_STATES, record
from dayshift.policy.training.lerobot_config import TrainingOptions
from dayshift.policy.training.train import Progress, train_on
from dayshift.policy.training.vlm import IMAGE_SIDE, SIZES, write_vlm
from dayshift.sim.tasks import LiberoTask, find_task, list_tasks


def main() -> None:
    """Command line."""
    args = _arguments()
    folder: Path = args.folder.resolve()  # lerobot writes it into the checkpoint
    tasks = [find_task(task) for task in args.tasks] if args.tasks else list(list_tasks())
    vlm, checkpoint = folder / "vlm", folder / "checkpoint"
    options = TrainingOptions(
        num_steps=args.steps,
        size=SIZES[args.size],
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        device=args.device,
        is_compiled=args.compile,
        max_s=60 * args.max_minutes,
    )
    if not (vlm / "config.json").is_file():
        write_vlm(vlm, [task.sentence for task in list_tasks()], options.size)
    dataset = _record(folder, tasks, args)
    if not (checkpoint / "config.json").is_file():
        trained = train_on(
            [open_dataset(dataset)],
            vlm,
            folder / "training",
            options,
            image_stride=args.image_stride,
            parallel=args.parallel,
            on_progress=_print,
        )
        assemble(trained, vlm, checkpoint)
    if args.trials:
        sys.exit(subprocess.call(_evaluation(checkpoint, folder / "evaluation", args, tasks)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", nargs="*", help="names, sentences or numbers; default: all of LIBERO-Goal")
    parser.add_argument("--episodes", type=int, default=80, help="attempts of the expert per task")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the policy")
    parser.add_argument("--steps", type=int, default=20_000, help="of training")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--max-minutes", type=float, default=float("inf"), help="for training")
    parser.add_argument("--image-stride", type=int, default=1, help="render every n-th control step")
    parser.add_argument("--parallel", type=int, default=2, help="simulators")
    parser.add_argument("--device", default="cuda", help="for training: cuda or cpu")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on cuda; pays from some minutes on",
    )
    parser.add_argument(
        "--trials", type=int, default=10, help="per task, on held-out states; 0: no evaluation"
    )
    parser.add_argument("--max-steps", type=int, default=300, help="of an evaluation's episode")
    return parser.parse_args()


def _record(folder: Path, tasks: Sequence[LiberoTask], args: argparse.Namespace) -> Path:
    """The dataset of demonstrations."""
    dataset, recordings = folder / "dataset", folder / "demonstrations"
    if (dataset / "meta" / "info.json").is_file():
        return dataset
    attempts = record(tasks, recordings, num_episodes=args.episodes, parallel=args.parallel)
    console = Console(stderr=True)
    for _ in track(attempts, "record", total=args.episodes * len(tasks), console=console):
        pass
    num_episodes = write_recordings(recordings, dataset)
    console.print(f"{num_episodes} demonstrations of {args.episodes * len(tasks)} attempts")
    return dataset


def _print(progress: Progress) -> None:
    Console(stderr=True).print(
        f"{progress.elapsed_s:.0f} s: update {progress.step}, loss {progress.loss:.4f}, "
        f"learning rate {progress.learning_rate:.1e}, {progress.num_control_steps} control steps"
    )


def _evaluation(
    checkpoint: Path, out: Path, args: argparse.Namespace, tasks: Sequence[LiberoTask]
) -> list[str]:
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
