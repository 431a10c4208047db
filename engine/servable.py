"""What the engine's core needs of a model that it serves beside the LLM: a policy.

Policies are above the engine in the order of imports, so the engine is handed functions that load them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dayshift.engine.action_api import ActionRequest, Actions, PolicyInfo


class Servable(Protocol):
    """A policy whose inference is cut into slices, so that the core can decode tokens in between."""

    @property
    def info(self) -> PolicyInfo: ...

    @property
    def max_batch_size(self) -> int: ...

    def slice_s(self, batch_size: int) -> Sequence[float]:
        """Seconds that the device needs for each slice of a batch of this size, as measured; 0 for one that
        has not run yet."""
        ...

    def prepare(self, request: ActionRequest) -> Any:
        """Check one request; what comes out is a member of a batch for `infer`.

        Raises InvalidRequestError: a malformed request fails here, alone.
        """
        ...

    def infer(self, batch: Sequence[Any]) -> Generator[None, None, list[Actions]]:
        """Run one batch; yields after each slice but the last and returns one chunk per member."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySource:
    """A policy to be served. `load` is called in the core's process, with `name`; it must be picklable.

    Its module should import torch only when it is called.
    """

    name: str
    load: Callable[[str], Servable]
