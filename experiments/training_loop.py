"""Operate, export, fine-tune, evaluate again: does a policy learn from its own operation?

python -m dayshift.experiments.training_loop TRAINED FOLDER

TRAINED is a folder of `python -m dayshift.policy.training`. Two arms continue its training for equally many
updates, with the same learning rates and batches:

operation  on the demonstrations that the policy was trained on, the operation's successful attempts (those
           that came after a failure included), and interventions: demonstrations of the expert that begin
           in the midst of the operation's failed attempts
control    on the old demonstrations alone

All three policies, with the one before, meet the same tasks and initial states, pair by pair: those that the
operation met, again, and held-out ones.

The loop can be spread over machines: copy both folders to the same paths and name the `--stages` that are
to run there.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from dayshift.dataset_export.run_folder import RecordedAttempt, open_run
from dayshift.experiments.evaluation.records import EvaluationFolder
from dayshift.experiments.evaluation.tables import compare, summarize
from dayshift.experiments.export_demo import dayshift
from dayshift.experiments.folders import RESULTS, open_run_folders
from dayshift.policy.training.demonstrations import NUM_TRAINING_STATES
from dayshift.policy.training.interventions import FailedAttempt, record_interventions
from dayshift.policy.training.vlm import IMAGE_SIDE
from dayshift.types import Outcome

if TYPE_CHECKING:
    from dayshift.policy.training.train import Progress

# lerobot is imported where it is used: processes that simulate and render import this module as well.

ARMS = ("before", "control", "operation")
_NUM_HELD_OUT_STATES = 10  # behind the training ones
STATES = ("met", "held out")  # by the operation, and by nobody
STAGES = ("collect", "render", "control", "operation", "evaluate")


def main() -> None:
    """Run the loop; a step whose result is there is not done again."""
    args = _arguments()
    source, folder = args.trained.resolve(), args.folder.resolve()
    old = source / "dataset"
    if "collect" in args.stages:
        run_dir = operate(source / "checkpoint", folder, args.settings)
        export(run_dir, folder / "dataset")
        intervene(run_dir, folder / "interventions", args)
    if "render" in args.stages:
        render(source / "checkpoint", [old, *collected(folder)], args)
    if "control" in args.stages:
        fine_tune(source, [old], folder / "control", args)
    if "operation" in args.stages:
        fine_tune(source, [old, *collected(folder)], folder / "operation", args)
    if "evaluate" in args.stages:
        checkpoints = {arm: folder / arm / "checkpoint" for arm in ARMS} | {"before": source / "checkpoint"}
        evaluations = {
            states: {arm: evaluate(arm, checkpoints[arm], states, folder, args) for arm in args.arms}
            for states in STATES
        }
        write_episodes(evaluations, folder / "episodes.csv")
        for states, of_arms in evaluations.items():
            print_table(f"initial states {states}", of_arms)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trained", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="default: all")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="to evaluate; default: all")
    parser.add_argument(
        "--interventions", type=int, default=100, help="of the expert, in failed attempts; 0: none"
    )
    parser.add_argument("--steps", type=int, default=5000, help="of the further training, in each arm")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="on cuda")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--max-minutes", type=float, default=float("inf"), help="for each arm's training")
    parser.add_argument("--image-stride", type=int, default=1, help="train with every n-th control step")
    parser.add_argument("--device", default="cuda", help="for training: cuda or cpu")
    parser.add_argument("--parallel", type=int, default=2, help="simulators")
    parser.add_argument(
        "--trials", type=int, default=10, help="held out, per task and policy; from the 11th on other seeds"
    )
    parser.add_argument("--again", type=int, default=3, help="times that what the operation met is met again")
    parser.add_argument("--tasks", help="of the evaluation: numbers with commas; default: all")
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--set", action="append", default=[], dest="settings", help="of the operation's YAML")
    return parser.parse_args()


def operation_of(folder: Path) -> Path | None:
    """The folder of the operation's run, once it has begun."""
    return max((folder / "runs").glob("*"), default=None)


def operate(checkpoint: Path, folder: Path, settings: list[str]) -> Path:
    """The folder of the operation's run; one that was stopped goes on."""
    if begun := operation_of(folder):
        if (begun / RESULTS).is_file():
            return begun
        arguments = ["--resume", str(begun)]
    else:
        policy = f"policy={{kind: smolvla, weights: {checkpoint}}}"
        arguments = ["training_loop", f"--runs-dir={folder / 'runs'}"]
        arguments += [f"--set={setting}" for setting in (policy, *settings)]
    return Path(dayshift("run", *arguments)["run_dir"])


def collected(folder: Path) -> list[Path]:
    """The datasets that the operation has given."""
    datasets = (folder / "dataset", folder / "interventions" / "dataset")
    return [dataset for dataset in datasets if (dataset / "meta" / "info.json").is_file()]


def export(run_dir: Path, dataset: Path) -> None:
    """What the operation did well, as a LeRobot dataset, if it did anything."""
    if not (dataset / "meta" / "info.json").is_file() and recorded_attempts(run_dir, Outcome.DONE):
        dayshift("export", str(run_dir), "--to", str(dataset), "--only", "done", "--no-language")


def intervene(run_dir: Path, folder: Path, args: argparse.Namespace) -> None:
    """The expert takes over in the operation's failed attempts, if there are any; a dataset of that."""
    from dayshift.policy.training.dataset import write_recordings

    dataset, recordings = folder / "dataset", folder / "recordings"
    if (dataset / "meta" / "info.json").is_file():
        return
    failed = [
        FailedAttempt(
            attempt_id=recorded.attempt.attempt_id,
            spec=recorded.start().spec,
            sim_states=recorded.frames().sim_state,
        )
        for recorded in recorded_attempts(run_dir, Outcome.FAILED)
    ]
    if not failed or not args.interventions:
        return
    attempts = record_interventions(
        failed, recordings, num_interventions=args.interventions, parallel=args.parallel
    )
    console = Console(stderr=True)
    for _ in track(attempts, "interventions", total=args.interventions, console=console):
        pass
    num_episodes = write_recordings(recordings, dataset)
    console.print(f"{num_episodes} demonstrations of {args.interventions} interventions")


def render(checkpoint: Path, datasets: Sequence[Path], args: argparse.Namespace) -> None:
    """The images that the arms are trained with, once for both."""
    from dayshift.policy.training.dataset import keep_rendered, open_dataset

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    for dataset in datasets:
        keep_rendered(
            open_dataset(dataset),
            image_side=config["resize_imgs_with_padding"][0],
            image_stride=args.image_stride,
            parallel=args.parallel,
        )


def recorded_attempts(run_dir: Path, outcome: Outcome) -> list[RecordedAttempt]:
    """The attempts that ended so, in order of time."""
    (folder,) = open_run_folders(run_dir)
    with open_run(run_dir, database=folder.arm.experiment.record.database) as run:
        return [recorded for recorded in run.recorded_attempts() if recorded.attempt.outcome == outcome]


def fine_tune(source: Path, datasets: Sequence[Path], arm: Path, args: argparse.Namespace) -> None:
    """Continue the source's training on `datasets`, all of them there from the first update on."""
    from dayshift.policy.training.assemble import assemble
    from dayshift.policy.training.dataset import open_dataset
    from dayshift.policy.training.lerobot_config import TrainingOptions
    from dayshift.policy.training.train import train_on, trained

    checkpoint = arm / "checkpoint"
    if (checkpoint / "config.json").is_file():
        return
    options = TrainingOptions(
        num_steps=args.steps,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        device=args.device,
        start_from=trained(source / "training"),
        begin_at=1.0,
        is_compiled=args.compile,
        max_s=60 * args.max_minutes,
    )
    vlm = source / "vlm"
    done = train_on(
        [open_dataset(dataset) for dataset in datasets],
        vlm,
        arm / "training",
        options,
        image_stride=args.image_stride,
        parallel=args.parallel,
        on_progress=_show,
    )
    assemble(done, vlm, checkpoint)


def evaluate(
    arm: str, checkpoint: Path, states: str, folder: Path, args: argparse.Namespace
) -> EvaluationFolder:
    """A policy on one kind of initial states; an evaluation that was stopped goes on."""
    out = folder / "evaluations" / states.replace(" ", "-") / arm
    command = [sys.executable, "-m", "dayshift", "eval", "--videos=none", f"--parallel={args.parallel}"]
    if (out / "evaluation.json").is_file():
        command += [f"--resume={out}"]
    else:
        command += [
            f"--policy={checkpoint}",
            f"--image-size={IMAGE_SIDE}",
            f"--max-steps={args.max_steps}",
            f"--out={out}",
        ]
        if states == "met":
            command += [f"--as-in={operation_of(folder)}", f"--trials={args.again}"]
        else:
            command += [
                f"--trials={args.trials}",
                f"--first-init-state={NUM_TRAINING_STATES}",
                f"--init-states={_NUM_HELD_OUT_STATES}",
                *([] if args.tasks is None else [f"--tasks={args.tasks}"]),
            ]
    if code := subprocess.call(command):
        sys.exit(code)
    return EvaluationFolder(out)


def write_episodes(evaluations: dict[str, dict[str, EvaluationFolder]], path: Path) -> None:
    """Every episode of every arm, a line of CSV each."""
    fields = ("task", "instruction", "init_state_id", "seed", "outcome", "num_control_steps")
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["states", "policy", *fields])
        for states, of_arms in evaluations.items():
            for arm, folder in of_arms.items():
                for record in sorted(folder.records(), key=lambda record: record.episode):
                    lines.writerow([states, arm, *(getattr(record, field) for field in fields)])


def print_table(title: str, evaluations: dict[str, EvaluationFolder]) -> None:
    """Success of each arm, and each against the control arm, pair by pair."""
    columns = ("policy", "done", "95 % Wilson interval", "better than control", "worse", "McNemar p")
    table = Table(*columns, title=title)
    for arm, folder in evaluations.items():
        rate = _rate(folder)
        low, high = rate["wilson_95"]
        cells = [arm, f"{rate['num_done']}/{rate['num_episodes']}", f"{100 * low:.1f} to {100 * high:.1f} %"]
        if arm != "control" and "control" in evaluations:
            test = compare(folder, evaluations["control"])
            cells += [str(test.only_first), str(test.only_second), f"{test.p_value:.3g}"]
        table.add_row(*cells)
    Console().print(table)


def _show(progress: Progress) -> None:
    line = f"{progress.elapsed_s:.0f} s: update {progress.step}, loss {progress.loss:.4f}"
    Console(stderr=True).print(line)


def _rate(folder: EvaluationFolder) -> dict[str, Any]:
    (arm,) = summarize(folder.plan(), folder.records())["arms"]
    return arm


if __name__ == "__main__":
    main()
