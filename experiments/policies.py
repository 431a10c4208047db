"""The policy of an experiment, and policies named on the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import dayshift.policy
from dayshift.engine.config import Device
from dayshift.engine.servable import PolicySource, Sharing
from dayshift.experiments.config import DEFAULT_MODEL, PolicyConfig
from dayshift.experiments.yaml_tree import ConfigError
from dayshift.policy.remote.chunk_queue import Blending
from dayshift.policy.remote.policy import Pace, RemoteOptions, remote_policy
from dayshift.policy.serving import smolvla_source
from dayshift.sim.types import PolicyFactory

SERVED_NAME = "policy"  # of an experiment's own policy in its engine


def policy_sources(
    named: Sequence[str], *, device: Device, sharing: Sharing = "slices"
) -> tuple[PolicySource, ...]:
    """What `--policy NAME=FOLDER` asks to be served. Raises ConfigError, DayshiftError for no checkpoint."""
    sources: dict[str, PolicySource] = {}
    for text in named:
        name, equals, checkpoint = text.partition("=")
        if not equals or not name.replace("-", "").replace("_", "").isalnum() or not checkpoint:
            raise ConfigError(f"--policy: found {text!r}, allowed: NAME=FOLDER (or a hub's id)")
        if name in sources:
            raise ConfigError(f"--policy: two policies are named {name}")
        sources[name] = smolvla_source(name, checkpoint, device=device, sharing=sharing)
    return tuple(sources.values())


def served_policies(policy: PolicyConfig, *, device: Device) -> tuple[PolicySource, ...]:
    """What the experiment's engine serves for its robots."""
    if policy.kind != "smolvla" or policy.url is not None:
        return ()
    weights = policy_weights(policy)
    return (smolvla_source(SERVED_NAME, weights, device=device, sharing=policy.sharing),)


def policy_weights(policy: PolicyConfig) -> str:
    """The checkpoint: a folder or a hub's id."""
    return str(default_policy_folder()) if policy.weights == DEFAULT_MODEL else policy.weights


def default_policy_folder() -> Path:
    """The small SmolVLA that comes with Dayshift."""
    return Path(dayshift.policy.__file__).parent / "weights"


def policy_factory(policy: PolicyConfig, engine_url: Callable[[], str] | None) -> PolicyFactory:
    """What makes the policy, in the simulator's process; `engine_url` is asked if it needs the engine."""
    match policy.kind:
        case "scripted_expert":
            # With it come the simulator's libraries, which commands that only serve do not wait for.
            from dayshift.policy.expert import ScriptedExpert

            return ScriptedExpert
        case "smolvla":
            options = RemoteOptions(
                n_action_steps=policy.n_action_steps,
                n_ahead_steps=policy.n_ahead_steps,
                blending=Blending(policy.blending),
                pace=Pace(policy.pace),
            )
            url = policy.url
            if url is None:
                assert engine_url is not None, "the engine is started for its policy"
                url = f"{engine_url()}/v1/policies/{SERVED_NAME}"
            return remote_policy(url, options)
