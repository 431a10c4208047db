"""What the engine's core needs of a model that it serves beside the LLM: a policy.

Policies are above the engine in the order of imports, so the engine is handed functions that load them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal, Protocol

from dayshift.engine.action_api import ActionRequest, Actions, PolicyInfo

Sharing = Literal["slices", "streams"]
"""How a policy shares a GPU with the LLM. slices: its work is cut, and the LLM's steps come in between.
streams: it runs on a CUDA stream of higher priority beside the LLM's steps, which do not wait for it."""


class Progress(Enum):
    """What an inference says when it gives way."""

    SLICE_DONE = auto()  # the next slice is launched when it is called again
    OPEN = auto()  # the same, and who is sent to it then joins the batch; if nobody is, nobody will
    ON_ITS_WAY = auto()  # all is launched: the LLM may go on meanwhile; to be asked again for the end


class Servable(Protocol):
    """A policy whose inference gives way to the LLM's steps."""

    @property
    def info(self) -> PolicyInfo: ...

    @property
    def max_batch_size(self) -> int: ...

    @property
    def group_size(self) -> int | None:
        """A batch may begin with so many, and grow by so many at a time, while others are still awaited: the
        device has enough to do with them. None: it begins with all."""
        ...

    def slice_s(self, batch_size: int) -> Sequence[float]:
        """Seconds that the LLM has to wait for each slice of a batch of this size, as measured.

        0 for one that has not run yet; what runs beside the LLM's steps is no slice.
        """
        ...

    def prepare(self, request: ActionRequest) -> Any:
        """Check one request; what comes out is a member of a batch for `infer`.

        Raises InvalidRequestError: a malformed request fails here, alone.
        """
        ...

    def infer(self, batch: Sequence[Any]) -> Generator[Progress, Sequence[Any] | None, Iterable[Actions]]:
        """Run one batch; yields after each slice, or each but the last, and returns one chunk per member, in
        a form that may still have to be made when it is taken, and then cannot fail.

        Where it yields OPEN it takes further members; nobody joins any more when it has been sent none.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySource:
    """A policy to be served. `load` is called in the core's process, with `name`; it must be picklable.

    Its module should import torch only when it is called.
    """

    name: str
    load: Callable[[str], Servable]
