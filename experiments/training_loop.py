"""Operate, export, fine-tune, evaluate again: does a policy learn from its own operation?

python -m dayshift.experiments.training_loop TRAINED FOLDER

TRAINED is a folder of `python -m dayshift.policy.training`. Two arms continue its training for equally many
steps: on the operation's successful attempts (those that came after a failure included), and, as control, on
the old demonstrations. All three policies meet the same tasks and held-out initial states, pair by pair.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dayshift.experiments.evaluation.records import EvaluationFolder
from dayshift.experiments.evaluation.tables import compare, summarize
from dayshift.experiments.export_demo import dayshift
from dayshift.policy.training.assemble import assemble
from dayshift.policy.training.dataset import open_dataset
from dayshift.policy.training.demonstrations import NUM_TRAINING_STATES
from dayshift.policy.training.lerobot_config import TrainingOptions
from dayshift.policy.training.train import Progress, train_on, trained
from dayshift.policy.training.vlm import IMAGE_SIDE

ARMS = ("before", "control", "operation")


def main() -> None:
    """Run the loop; a step whose result is there is not done again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trained", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=5000, help="of the further training, in each arm")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--device", default="cuda", help="for training: cuda or cpu")
    parser.add_argument("--parallel", type=int, default=2, help="simulators")
    parser.add_argument("--trials", type=int, default=10, help="per task and policy")
    parser.add_argument("--tasks", help="of the evaluation: numbers with commas; default: all")
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--set", action="append", default=[], dest="settings", help="of the operation's YAML")
    args = parser.parse_args()
    source, folder = args.trained.resolve(), args.folder.resolve()

    operation = operate(source / "checkpoint", folder, args.settings)
    for arm, dataset in (("control", source / "dataset"), ("operation", operation)):
        fine_tune(source, dataset, folder / arm, args)
    checkpoints = {"before": source / "checkpoint"}
    checkpoints |= {arm: folder / arm / "checkpoint" for arm in ("control", "operation")}
    evaluations = {arm: evaluate(arm, checkpoints[arm], folder, args) for arm in ARMS}
    print_table(evaluations)


def operate(checkpoint: Path, folder: Path, settings: list[str]) -> Path:
    """Run the operation and export what it did well; the dataset."""
    dataset = folder / "dataset"
    if not (dataset / "meta" / "info.json").is_file():
        policy = f"--set=policy={{kind: smolvla, weights: {checkpoint}}}"
        changes = [policy, *(f"--set={setting}" for setting in settings)]
        run = dayshift("run", "training_loop", "--runs-dir", str(folder / "runs"), *changes)
        dayshift("export", run["run_dir"], "--to", str(dataset), "--only", "done", "--no-language")
    return dataset


def fine_tune(source: Path, dataset: Path, arm: Path, args: argparse.Namespace) -> None:
    """Continue the source's training on `dataset`."""
    if (arm / "checkpoint" / "config.json").is_file():
        return
    options = TrainingOptions(
        num_steps=args.steps,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        device=args.device,
        start_from=trained(source / "training"),
    )
    vlm = source / "vlm"
    done = train_on(
        open_dataset(dataset),
        vlm,
        arm / "training",
        options,
        parallel=args.parallel,
        on_progress=_show,
    )
    assemble(done, vlm, arm / "checkpoint")


def evaluate(arm: str, checkpoint: Path, folder: Path, args: argparse.Namespace) -> EvaluationFolder:
    """The held-out initial states."""
    out = folder / "evaluations" / arm
    command = [sys.executable, "-m", "dayshift", "eval", f"--parallel={args.parallel}"]
    if (out / "evaluation.json").is_file():
        command += [f"--resume={out}"]
    else:
        command += [
            f"--policy={checkpoint}",
            f"--trials={args.trials}",
            f"--first-init-state={NUM_TRAINING_STATES}",
            f"--image-size={IMAGE_SIDE}",
            f"--max-steps={args.max_steps}",
            f"--out={out}",
            *([] if args.tasks is None else [f"--tasks={args.tasks}"]),
        ]
    if code := subprocess.call(command):
        sys.exit(code)
    return EvaluationFolder(out)


def print_table(evaluations: dict[str, EvaluationFolder]) -> None:
    """Success of each arm, and each against the control arm, pair by pair."""
    table = Table("policy", "done", "95 % Wilson interval", "better than control", "worse", "McNemar p")
    for arm, folder in evaluations.items():
        rate = _rate(folder)
        low, high = rate["wilson_95"]
        cells = [arm, f"{rate['num_done']}/{rate['num_episodes']}", f"{100 * low:.1f} to {100 * high:.1f} %"]
        if arm != "control":
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
