"""Who is evaluated: the scripted expert, recorded actions, weights that we serve, or somebody's server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from dayshift.engine.config import Device, EngineConfig
from dayshift.experiments.engines import EngineServer
from dayshift.experiments.evaluation.records import EvaluationFolder
from dayshift.experiments.planners import default_model_folder
from dayshift.experiments.yaml_tree import ConfigError
from dayshift.policy.expert import ScriptedExpert
from dayshift.policy.remote.connections import connect
from dayshift.policy.remote.policy import RemoteOptions, chunk_options, remote_policy
from dayshift.policy.replay import ReplayPolicy
from dayshift.policy.serving import smolvla_source
from dayshift.sim.libero_env import LiberoEnv
from dayshift.sim.types import Action, Observation, PolicyFactory, RolloutSpec

EXPERT, REPLAY = "expert", "replay"
SERVED_NAME = "policy"

FactoryFor = Callable[[RemoteOptions], PolicyFactory]
"""The policy of an arm, by how it is followed."""


@contextmanager
def evaluated_policy(
    policy: str, *, arms: Sequence[RemoteOptions], replay_of: Path | None, device: Device, log: Path
) -> Iterator[FactoryFor]:
    """What makes the policy; a server of ours runs while the context lasts, if one is needed.

    Raises ConfigError and DayshiftError for what cannot be evaluated, of any arm.
    """
    if (policy == REPLAY) != (replay_of is not None):
        raise ConfigError("--policy replay and --replay-of FOLDER belong together")
    if policy == EXPERT:
        yield lambda _: ScriptedExpert
    elif replay_of is not None:
        EvaluationFolder(replay_of).plan()  # is there one?
        factory = partial(_make_replay, folder=replay_of)
        yield lambda _: factory
    elif "://" in policy:
        # Before simulators start, which takes long: a wrong address, and options that cannot work.
        with closing(connect(policy, timeout_s=RemoteOptions().call_timeout_s)) as connection:
            for options in arms:
                chunk_options(connection, options)
        yield partial(remote_policy, policy)
    else:
        config = EngineConfig(
            model=str(default_model_folder()),
            device=device,
            kv_cache_bytes=64 << 20,  # the planner beside it is not asked anything
            policies=(smolvla_source(SERVED_NAME, policy, device=device),),
        )
        server = EngineServer(config, model_name="default", port=0, log=log)
        try:
            yield partial(remote_policy, f"{server.url()}/v1/policies/{SERVED_NAME}")
        finally:
            server.close()


class RecordedActions:
    """Plays what another evaluation executed in the same episode."""

    def __init__(self, folder: Path) -> None:
        self._folder = EvaluationFolder(folder)
        self._files = {
            (record.task_name, record.init_state_id, record.seed): f"{record.episode}.npy"
            for record in self._folder.records()
        }

    def reset(self, spec: RolloutSpec) -> None:
        name = self._files.get((spec.task.rpartition("/")[2], spec.init_state_id, spec.seed))
        actions = np.zeros((0, 7), np.float32) if name is None else np.load(self._folder.actions / name)
        self._replay = ReplayPolicy(list(actions))
        self._replay.reset(spec)

    def act(self, observation: Observation) -> Action:
        return self._replay.act(observation)


def _make_replay(env: LiberoEnv, *, folder: Path) -> RecordedActions:
    return RecordedActions(folder)
