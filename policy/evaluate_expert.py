"""Success of the scripted expert per task: `python -m dayshift.policy.evaluate_expert [--num-inits 10]`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dayshift.policy.expert import ScriptedExpert
from dayshift.sim.libero_env import MAX_STEPS, LiberoEnv
from dayshift.sim.rollout import rollout
from dayshift.sim.tasks import LiberoTask, find_task, list_tasks
from dayshift.sim.types import Fault, Frame, RolloutSpec, RolloutStart
from dayshift.types import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """The expert's attempts at one task."""

    task: str
    num_done: int
    num_attempts: int
    mean_steps: float | None  # of the successful attempts
    max_steps: int
    mean_wall_s: float
    failed_init_state_ids: tuple[int, ...]


def evaluate_task(
    env: LiberoEnv,
    task: LiberoTask,
    init_state_ids: Sequence[int],
    *,
    fault: Fault | None = None,
    camera_hz: float = 0.0,
) -> TaskScore:
    """Run the expert once per init state (seed = init state) and count LIBERO's verdicts."""
    policy = ScriptedExpert(env)
    steps: list[int] = []
    failed: list[int] = []
    started_at = time.monotonic()
    for init_state_id in init_state_ids:
        spec = RolloutSpec(
            task=task.name_in_suite,
            init_state_id=init_state_id,
            seed=init_state_id,
            max_steps=MAX_STEPS,
            instruction=task.sentence,
            fault=fault,
            camera_hz=camera_hz,
        )
        result = rollout(env, policy, spec, _ignore_start, _ignore_frame)
        if result.outcome is Outcome.DONE:
            steps.append(result.num_control_steps)
        else:
            failed.append(init_state_id)
    return TaskScore(
        task=task.name,
        num_done=len(steps),
        num_attempts=len(init_state_ids),
        mean_steps=float(np.mean(steps)) if steps else None,
        max_steps=max(steps, default=0),
        mean_wall_s=(time.monotonic() - started_at) / len(init_state_ids),
        failed_init_state_ids=tuple(failed),
    )


def main() -> None:
    """Command line: run the expert, print its score per task and the protocol."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="*", help="names, sentences or numbers; default: all of LIBERO-Goal")
    parser.add_argument("--num-inits", type=int, default=10, help="init states 0 … n-1")
    parser.add_argument("--camera-hz", type=float, default=0.0, help="live rendering of both cameras")
    parser.add_argument("--fault", help="gripper_slip, push or short_budget, with its default strength")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()

    tasks = [find_task(task) for task in args.tasks] if args.tasks else list_tasks()
    fault = Fault(kind=args.fault) if args.fault else None
    env = LiberoEnv()
    scores = [
        evaluate_task(env, task, range(args.num_inits), fault=fault, camera_hz=args.camera_hz)
        for task in track(tasks, "expert", console=Console(stderr=True))
    ]
    if args.json:
        print(json.dumps({"protocol": env.protocol(), "scores": [asdict(score) for score in scores]}))
    else:
        _print_table(scores, env.protocol())
    env.close()


def _print_table(scores: Sequence[TaskScore], protocol: dict[str, str]) -> None:
    table = Table("task", "done", "mean steps", "max", "s per attempt", "failed init states")
    for score in scores:
        table.add_row(
            score.task,
            f"{score.num_done}/{score.num_attempts}",
            "" if score.mean_steps is None else f"{score.mean_steps:.0f}",
            str(score.max_steps),
            f"{score.mean_wall_s:.1f}",
            " ".join(map(str, score.failed_init_state_ids)),
        )
    num_done, num_attempts = sum(s.num_done for s in scores), sum(s.num_attempts for s in scores)
    table.add_row("all", f"{num_done}/{num_attempts}")
    console = Console()
    console.print(table)
    console.print(" · ".join(f"{name}: {value}" for name, value in protocol.items()))


def _ignore_start(spec: RolloutSpec, start: RolloutStart) -> None: ...


def _ignore_frame(frame: Frame) -> None: ...


if __name__ == "__main__":
    main()
