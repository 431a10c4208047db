"""The planner client that an experiment asks for."""

from __future__ import annotations

import os
from pathlib import Path

from dayshift import planner
from dayshift.engine.client import DayshiftClient
from dayshift.experiments.config import DEFAULT_MODEL, PlannerConfig
from dayshift.planner.clients.api import PlannerClient
from dayshift.planner.clients.chat import ChatClient
from dayshift.planner.clients.scripted import ScriptedPlanner
from dayshift.planner.clients.session import SessionClient
from dayshift.planner.memory import MemoryArm
from dayshift.planner.protocol import SYSTEM_PROMPTS, Dialect
from dayshift.types import DayshiftError


def default_model_folder() -> Path:
    """The small planner model that comes with Dayshift."""
    return Path(planner.__file__).parent / "weights"


def model_source(model: str) -> str:
    """A model of the command line or a file as the engine is told it: a folder, a GGUF file or a hub's id."""
    return str(default_model_folder()) if model == DEFAULT_MODEL else model


def engine_model(config: PlannerConfig) -> str:
    """The planner's model as the engine is told it."""
    return model_source(config.model)


def dialect(config: PlannerConfig) -> Dialect:
    """The wording of the prompts."""
    if config.dialect != "auto":
        return config.dialect
    return "compact" if config.model == DEFAULT_MODEL else "general"


def make_planner(
    config: PlannerConfig, *, engine: DayshiftClient | None, engine_url: str | None, run_id: str, seed: int
) -> PlannerClient:
    """One robot's conversation with its planner; `engine` is ours, where one is needed."""
    system = SYSTEM_PROMPTS[dialect(config)]
    match config.memory:
        case MemoryArm.ORACLE:
            return ScriptedPlanner(remembers=True)
        case MemoryArm.FULL | MemoryArm.OFF:
            return ChatClient(
                config.base_url or f"{engine_url}/v1",
                arm=config.memory,
                model=config.model,
                system=system,
                temperature=config.temperature,
                seed=seed,
                api_key=_api_key(config),
                timeout_s=config.timeout_s,
            )
        case MemoryArm.WINDOW | MemoryArm.RECALL_TEXT | MemoryArm.RECALL_KV:
            assert engine is not None
            return SessionClient(
                engine,
                arm=config.memory,
                system=system,
                session_prefix=run_id,
                window=config.window,
                temperature=config.temperature,
                seed=seed,
            )


def _api_key(config: PlannerConfig) -> str | None:
    if config.api_key_env is None:
        return None
    if not (key := os.environ.get(config.api_key_env)):
        raise DayshiftError(f"planner.api_key_env: the environment has no {config.api_key_env}")
    return key
