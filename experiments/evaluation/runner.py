"""Runs the episodes of an evaluation in parallel simulators, each kept before the next one begins."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from dayshift.experiments.evaluation.plan import Episode, EvaluationPlan, Videos
from dayshift.experiments.evaluation.policies import FactoryFor
from dayshift.experiments.evaluation.records import EpisodeRecord, EvaluationFolder
from dayshift.experiments.evaluation.videos import FilmMaker
from dayshift.experiments.interrupts import INTERRUPT_CHECK_S, raise_if_interrupted
from dayshift.sim.tasks import list_tasks
from dayshift.sim.types import Frame, RolloutResult, RolloutSpec, RolloutStart
from dayshift.sim.worker import RobotSimulator
from dayshift.types import Outcome

MAX_INFRA_RETRIES = 2

OnEpisode = Callable[[EpisodeRecord], None]


def run_episodes(
    plan: EvaluationPlan,
    episodes: Sequence[Episode],
    folder: EvaluationFolder,
    *,
    policy: FactoryFor,
    parallel: int,
    videos: Videos,
    on_episode: OnEpisode,
) -> None:
    """Run `episodes` and append each to `folder`; `on_episode` is told, in any order and thread.

    Raises DayshiftError for a mistake that concerns all of them; what has ended is kept.
    """
    with FilmMaker() as films:
        for num_used in dict.fromkeys(episode.n_action_steps for episode in episodes):
            arm = deque(episode for episode in episodes if episode.n_action_steps == num_used)
            factory = policy(plan.remote_options(num_used))
            simulators = [RobotSimulator(factory) for _ in range(min(parallel, len(arm)))]
            worker = _Worker(plan, arm, folder, films=films, videos=videos, on_episode=on_episode)
            _run_all(worker, simulators)


def _run_all(worker: _Worker, simulators: Iterable[RobotSimulator]) -> None:
    """One thread for each simulator; the first mistake, or Ctrl-C, stops all."""
    simulators = list(simulators)
    with ThreadPoolExecutor(len(simulators), "evaluation") as threads:
        running = [threads.submit(worker.run, simulator) for simulator in simulators]
        try:
            unfinished = set(running)
            while unfinished:
                raise_if_interrupted()
                done, unfinished = wait(unfinished, INTERRUPT_CHECK_S, FIRST_EXCEPTION)
                for future in done:
                    future.result()
        finally:
            worker.stop.set()


class _Worker:
    """Takes one episode after the other, until there are none."""

    def __init__(
        self,
        plan: EvaluationPlan,
        episodes: deque[Episode],
        folder: EvaluationFolder,
        *,
        films: FilmMaker,
        videos: Videos,
        on_episode: OnEpisode,
    ) -> None:
        self.stop = threading.Event()
        self._plan = plan
        self._episodes = episodes
        self._folder = folder
        self._films = films
        self._videos = videos
        self._on_episode = on_episode
        self._lock = threading.Lock()

    def run(self, simulator: RobotSimulator) -> None:
        """Until there are no episodes left, or `stop` is set; closes the simulator."""
        with simulator:
            while (episode := self._next()) is not None:
                self._run_episode(simulator, episode)

    def _next(self) -> Episode | None:
        with self._lock:
            return self._episodes.popleft() if self._episodes and not self.stop.is_set() else None

    def _run_episode(self, simulator: RobotSimulator, episode: Episode) -> None:
        spec = self._plan.rollout_spec(episode)
        num_retries = 0
        take, result = self._attempt(simulator, spec)
        while result.outcome is Outcome.INFRA and num_retries < MAX_INFRA_RETRIES:
            if self.stop.is_set():
                return  # cancelled; it is run again on --resume
            num_retries += 1
            take, result = self._attempt(simulator, spec)
        record = _record(self._plan, episode, spec, result, num_retries)
        with self._lock:
            self._folder.append(record, take.actions)
            if take.start is not None:
                self._folder.keep_protocol(take.start.protocol)
            is_filmed = self._videos == "all" or (
                self._videos == "failures" and result.outcome is Outcome.FAILED
            )
            if is_filmed and take.start is not None:
                path = self._folder.videos / f"{episode}.mp4"
                self._films.film(path, spec, take.start, take.states)
            self._on_episode(record)

    def _attempt(self, simulator: RobotSimulator, spec: RolloutSpec) -> tuple[_Take, RolloutResult]:
        take = _Take()
        return take, simulator.run(spec, take.on_start, take.on_frame, cancel=self.stop)


class _Take:
    """What is kept of a rollout while it runs."""

    def __init__(self) -> None:
        self.start: RolloutStart | None = None
        self.actions: list[NDArray[np.float32]] = []
        self.states: list[NDArray[np.float64]] = []

    def on_start(self, spec: RolloutSpec, start: RolloutStart) -> None:
        self.start = start

    def on_frame(self, frame: Frame) -> None:
        self.actions.append(frame.action)
        self.states.append(frame.sim_state)


def _record(
    plan: EvaluationPlan, episode: Episode, spec: RolloutSpec, result: RolloutResult, num_retries: int
) -> EpisodeRecord:
    return EpisodeRecord(
        task=episode.task,
        task_name=list_tasks(plan.suite)[episode.task].name,
        trial=episode.trial,
        n_action_steps=episode.n_action_steps,
        init_state_id=spec.init_state_id,
        seed=spec.seed,
        instruction=spec.instruction,
        outcome=result.outcome,
        num_control_steps=result.num_control_steps,
        wall_s=round(result.wall_s, 3),
        detail=result.detail,
        num_infra_retries=num_retries,
        policy_report={name: round(number, 1) for name, number in result.policy_report.items()},
    )
