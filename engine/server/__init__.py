"""The engine's HTTP front: OpenAI's API, the session API, health and metrics."""

from dayshift.engine.server.limits import Limits
from dayshift.engine.server.run import running_server, serve

__all__ = ["Limits", "running_server", "serve"]
