"""What the routes share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from dayshift.engine.async_engine import AsyncEngine
from dayshift.engine.server.metrics import Metrics
from dayshift.engine.tokenizer import Tokenizer
from dayshift.engine.wire import ModelNotFoundError


@dataclass(frozen=True, slots=True)
class ServerState:
    """One engine behind one app."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    model_name: str
    metrics: Metrics

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError if a request names another model."""
        if name is not None and name != self.model_name:
            raise ModelNotFoundError(f"model {name!r} is not served here; {self.model_name!r} is")


def _state(request: Request) -> ServerState:
    return request.app.state.server


State = Annotated[ServerState, Depends(_state)]
