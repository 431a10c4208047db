"""The inference engine: paged KV, continuous batching, and sessions with memory.

`dayshift.engine.api` and `dayshift.engine.client` are free of torch; `Engine` loads it on first use.
"""

from typing import TYPE_CHECKING, Any

from dayshift.engine.config import EngineConfig

if TYPE_CHECKING:
    from dayshift.engine.engine import Engine

__all__ = ["Engine", "EngineConfig"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from dayshift.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
