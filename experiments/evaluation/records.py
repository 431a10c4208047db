"""The folder of an evaluation: its settings, one line per episode, the actions, videos.

evaluation.json    plan and versions; written once
protocol.json      what the simulator says of itself, from the first episode
episodes.jsonl     one line per finished episode, appended; of one that broke and was tried again the
                   last line counts; a half line of a killed run is dropped
actions/           what was executed, float32 (num_steps, 7) per episode, for `--policy replay`
videos/            of failures
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dayshift.experiments.evaluation.plan import Episode, EvaluationPlan
from dayshift.experiments.folders import describe_environment
from dayshift.experiments.yaml_tree import ConfigError
from dayshift.types import Outcome

_SETTINGS = "evaluation.json"
_PROTOCOL = "protocol.json"
_EPISODES = "episodes.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """How one episode ended."""

    task: int
    task_name: str
    trial: int
    n_action_steps: int | None
    init_state_id: int
    seed: int
    instruction: str
    outcome: Outcome
    num_control_steps: int
    wall_s: float
    detail: str
    num_infra_retries: int
    policy_report: dict[str, float]

    @property
    def episode(self) -> Episode:
        """Which one it was."""
        return Episode(task=self.task, trial=self.trial, n_action_steps=self.n_action_steps)

    @property
    def is_success(self) -> bool:
        """LIBERO's test passed."""
        return self.outcome is Outcome.DONE

    @property
    def is_robots(self) -> bool:
        """The outcome says something about the policy: simulator and server did not break."""
        return self.outcome is not Outcome.INFRA


@dataclass(frozen=True, slots=True)
class EvaluationFolder:
    """An evaluation on the disk."""

    path: Path

    def create(self, plan: EvaluationPlan) -> None:
        """Make the folder. Raises ConfigError if it holds an evaluation already."""
        if (self.path / _SETTINGS).exists():
            raise ConfigError(f"{self.path} holds an evaluation; go on with --resume {self.path}")
        self.actions.mkdir(parents=True, exist_ok=True)
        settings = {"plan": plan, "environment": describe_environment()}
        text = json.dumps(msgspec.to_builtins(settings), indent=2, ensure_ascii=False)
        (self.path / _SETTINGS).write_text(text + "\n", encoding="utf-8")

    @property
    def actions(self) -> Path:
        """Folder of executed actions."""
        return self.path / "actions"

    @property
    def videos(self) -> Path:
        """Folder of videos."""
        return self.path / "videos"

    def settings(self) -> dict[str, Any]:
        """What `create` wrote. Raises ConfigError when this is no evaluation's folder."""
        path = self.path / _SETTINGS
        if not path.is_file():
            raise ConfigError(f"{self.path}: found no {_SETTINGS}, allowed: the folder of an evaluation")
        return json.loads(path.read_text(encoding="utf-8"))

    def plan(self) -> EvaluationPlan:
        """The settings it was started with."""
        return msgspec.convert(self.settings()["plan"], EvaluationPlan)

    def keep_protocol(self, protocol: Mapping[str, str]) -> None:
        """Keep what the simulator says of itself, once."""
        path = self.path / _PROTOCOL
        if not path.exists():
            path.write_text(json.dumps(dict(protocol), indent=2) + "\n", encoding="utf-8")

    def protocol(self) -> dict[str, str]:
        """What the simulator said of itself; empty before the first episode has ended."""
        path = self.path / _PROTOCOL
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def records(self) -> list[EpisodeRecord]:
        """The finished episodes, each as it ended last; a line that was cut off is left out."""
        path = self.path / _EPISODES
        if not path.is_file():
            return []
        lines = path.read_bytes().split(b"\n")[:-1]
        records = [msgspec.json.decode(line, type=EpisodeRecord) for line in lines]
        return list({record.episode: record for record in records}.values())

    def append(self, record: EpisodeRecord, actions: Sequence[NDArray[np.float32]]) -> None:
        """Keep an episode: its actions first, so that a line always has them."""
        np.save(self.actions / f"{record.episode}.npy", np.array(actions, dtype=np.float32).reshape(-1, 7))
        with (self.path / _EPISODES).open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")

    def drop_half_line(self) -> None:
        """Cut off what a killed run left behind the last whole line."""
        path = self.path / _EPISODES
        if path.is_file():
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if whole != data:
                path.write_bytes(whole)
