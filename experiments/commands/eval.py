"""`dayshift eval`: the success rate of a policy under LIBERO's protocol."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from dayshift.dataset_export.durable import only_writer
from dayshift.engine.config import Device
from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.errors import StoppedByUserError, traceback_kept_in
from dayshift.experiments.evaluation.plan import EvaluationPlan, Instructions, Videos, task_numbers
from dayshift.experiments.evaluation.records import EvaluationFolder
from dayshift.experiments.evaluation.tables import (
    compare,
    print_comparison,
    print_evaluation,
    protocol_of,
    summarize,
)
from dayshift.experiments.yaml_tree import ConfigError
from dayshift.policy.remote.chunk_queue import Blending
from dayshift.policy.remote.policy import Pace
from dayshift.sim.tasks import DEFAULT_SUITE, list_tasks, load_init_states, max_steps_of


def evaluate(
    policy: Annotated[
        str | None,
        typer.Option(
            help="expert, replay, a SmolVLA checkpoint (folder or hub id), or a policy server "
            "(http://… ours, ws://… openpi's protocol)."
        ),
    ] = None,
    suite: Annotated[
        str, typer.Option(help="libero_goal, …, or LIBERO-PRO's libero_goal_swap, ….")
    ] = DEFAULT_SUITE,
    tasks: Annotated[
        str | None, typer.Option(help="Numbers or sentences, with commas; default: all.")
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(min=1, help="Episodes per task; default: 10. With --as-in: of each start; default: 1."),
    ] = None,
    first_init_state: Annotated[int, typer.Option(min=0, help="Trial i starts from this one + i.")] = 0,
    init_states: Annotated[
        int | None,
        typer.Option(min=1, help="How many; further trials begin again at the first, with the next seed."),
    ] = None,
    as_in: Annotated[
        Path | None, typer.Option(help="The tasks and initial states that this run met, instead.")
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Simulators at once.")] = 1,
    n_action_steps: Annotated[
        str | None, typer.Option(help="Actions used of a chunk; several with commas give a curve.")
    ] = None,
    blending: Annotated[Blending, typer.Option(help="Where chunks overlap.")] = Blending.REPLACE,
    pace: Annotated[
        Pace, typer.Option(help="wait: the simulator waits for chunks; real_time: 20 Hz.")
    ] = Pace.WAIT,
    n_ahead_steps: Annotated[int, typer.Option(min=0, help="Ask so many steps before a chunk is due.")] = 0,
    instructions: Annotated[
        Instructions, typer.Option(help="shuffled: every task is told another one's sentence.")
    ] = Instructions.OWN,
    seed: Annotated[int, typer.Option(min=0, max=4_000_000, help="Fixture poses and noise.")] = 0,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Default: the suite's protocol.")] = None,
    image_size: Annotated[int, typer.Option(min=32, max=1024, help="Pixels.")] = 256,
    videos: Annotated[Videos, typer.Option(help="Which episodes are filmed.")] = "failures",
    replay_of: Annotated[
        Path | None, typer.Option(help="Evaluation whose actions --policy replay plays.")
    ] = None,
    device: Annotated[Device, typer.Option(help="For a checkpoint.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder; default: a new one in runs/.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with an evaluation that was stopped.")] = None,
    compare_with: Annotated[
        list[Path] | None, typer.Option("--compare", help="Compare with this evaluation, pair by pair.")
    ] = None,
    episodes: Annotated[bool, typer.Option("--episodes", help="Print every episode.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Evaluate a policy: success per task, its interval, the protocol; or compare two evaluations."""
    if resume is not None:
        if policy is not None:
            raise ConfigError("--resume: an evaluation goes on with its own settings; --policy has no effect")
        folder = EvaluationFolder(resume)
        folder.settings()  # raises unless it is an evaluation's
    elif policy is not None:
        if as_in is not None and (tasks, first_init_state, init_states) != (None, 0, None):
            raise ConfigError("--as-in: the run names tasks and initial states; allowed beside it: --trials")
        starts = None if as_in is None else _starts_of_run(as_in, suite)
        plan = EvaluationPlan(
            policy=policy,
            suite=suite,
            tasks=task_numbers(suite, tasks) if starts is None else tuple(sorted({t for t, _ in starts})),
            num_trials=trials or (10 if starts is None else 1),
            starts=starts,
            first_init_state=first_init_state,
            num_init_states=init_states,
            seed=seed,
            max_steps=max_steps_of(suite) if max_steps is None else max_steps,
            image_size=image_size,
            instructions=instructions,
            n_action_steps=_counts(n_action_steps),
            blending=blending,
            pace=pace,
            n_ahead_steps=n_ahead_steps,
            replay_of=None if replay_of is None else str(replay_of.resolve()),
        )
        _check_init_states(plan)
        folder = EvaluationFolder(out or Path("runs") / f"eval-{time.strftime('%Y%m%d-%H%M%S')}")
        folder.create(plan)
    else:
        raise ConfigError("eval: give --policy, or --resume FOLDER")
    with stdout_kept_for_json() as print_json, only_writer(folder.path):
        folder.drop_half_line()
        _run(folder, parallel=parallel, videos=videos, device=device)
        if as_json:
            print_json(_as_json(folder, compare_with or []))
    if not as_json:
        console = Console()
        print_evaluation(console, folder, episodes=episodes)
        for other in compare_with or []:
            print_comparison(console, folder, EvaluationFolder(other))
        console.print(f"kept in {folder.path}")


def _starts_of_run(run: Path, suite: str) -> tuple[tuple[int, int], ...]:
    # Here, because it loads the libraries of databases and films, which no other command should wait for.
    from dayshift.experiments.evaluation.starts import starts_of_run

    return starts_of_run(run, suite)


def _run(folder: EvaluationFolder, *, parallel: int, videos: Videos, device: Device) -> None:
    """Run what is missing, and again what broke."""
    from dayshift.experiments.evaluation.policies import evaluated_policy
    from dayshift.experiments.evaluation.runner import run_episodes

    plan = folder.plan()
    finished = {record.episode for record in folder.records() if record.is_robots}
    missing = [episode for episode in plan.episodes() if episode not in finished]
    if not missing:
        return
    replay_of = None if plan.replay_of is None else Path(plan.replay_of)
    log = folder.path / "engine.log"
    try:
        with (
            traceback_kept_in(folder.path),
            evaluated_policy(
                plan.policy, arms=plan.arms(), replay_of=replay_of, device=device, log=log
            ) as policy,
            Progress(console=Console(stderr=True)) as progress,
        ):
            bar = progress.add_task(f"{plan.policy} on {plan.suite}", total=len(missing))
            run_episodes(
                plan,
                missing,
                folder,
                policy=policy,
                parallel=parallel,
                videos=videos,
                on_episode=lambda _: progress.advance(bar),
            )
    except KeyboardInterrupt:
        raise StoppedByUserError(
            f"interrupted; what has ended is kept, go on with: dayshift eval --resume {folder.path}"
        ) from None


def _as_json(folder: EvaluationFolder, others: list[Path]) -> dict[str, Any]:
    return {
        "folder": str(folder.path),
        **summarize(folder.plan(), folder.records()),
        "protocol": protocol_of(folder),
        "environment": folder.settings()["environment"],
        "episodes": [msgspec.to_builtins(record) for record in folder.records()],
        "comparisons": [
            {"with": str(other), **msgspec.to_builtins(compare(folder, EvaluationFolder(other)))}
            for other in others
        ],
    }


def _counts(text: str | None) -> tuple[int | None, ...]:
    if text is None:
        return (None,)
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--n-action-steps: found {text!r}, allowed: whole numbers above 0, with commas")
    return tuple(dict.fromkeys(int(word) for word in words))


def _check_init_states(plan: EvaluationPlan) -> None:
    for number in plan.tasks:
        task = list_tasks(plan.suite)[number]
        last, num_states = max(plan.init_states_of(number)), len(load_init_states(task))
        if last >= num_states:
            raise ConfigError(
                f"--trials: {task.name} has initial states 0 to {num_states - 1}, the last trial needs {last}"
            )
