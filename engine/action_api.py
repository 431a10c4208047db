"""Border types of policies: observations in, action chunks out. No torch and no numpy here.

Between the engine's processes they travel as msgpack, over HTTP as JSON or msgpack, field names unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from dayshift.engine.api import EngineError

Actions = tuple[tuple[float, ...], ...]  # (num_actions, action_dim), in dataset units
Count = Annotated[int, msgspec.Meta(ge=0)]


class CameraImage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One RGB image: `data` holds height x width x 3 bytes, row by row."""

    height: int
    width: int
    data: bytes


class RunningChunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left of the chunk that the robot still follows, for real-time chunking (arXiv:2506.07339).

    `actions` are those not executed yet when the observation was taken, in dataset units. The first
    `num_frozen` of them will have been executed before the new chunk arrives; from there the new chunk may
    leave them more and more, and from `num_guided` on it is free.
    """

    actions: Actions
    num_frozen: Count
    num_guided: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRequest:
    """One robot's observation, and how soon it needs the next actions.

    `images` go by camera name as the policy knows them; `state` is in dataset units. `deadline` is
    `time.monotonic()` on the engine's machine: the earliest goes first, and what is late before it was
    begun is refused. `seed` fixes the noise that the chunk is made from.
    """

    policy: str
    images: dict[str, CameraImage]
    state: tuple[float, ...]
    instruction: str
    deadline: float | None = None
    seed: int | None = None
    running: RunningChunk | None = None


class ActionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An `ActionRequest` as `POST /v1/policies/{name}/actions` takes it: JSON (bytes as base64) or msgpack.

    `deadline_ms` counts from when the server has read the request.
    """

    images: dict[str, CameraImage]
    state: tuple[float, ...]
    instruction: str
    deadline_ms: Annotated[float, msgspec.Meta(gt=0)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    running: RunningChunk | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionChunk:
    """The answer to one request, and where its time went."""

    actions: Actions
    queued_ms: float  # until its batch began
    infer_ms: float  # from there, planner tokens that were computed in between included
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInfo:
    """A served policy as `GET /v1/policies` shows it."""

    name: str
    kind: str  # smolvla
    cameras: tuple[str, ...]
    state_dim: int
    action_dim: int
    chunk_size: int  # actions in a chunk
    n_action_steps: int  # of those, how many the policy was meant to execute before the next chunk


class PolicyNotFoundError(EngineError):
    """The server serves no policy of this name."""

    status = 404


class DeadlineExceededError(EngineError):
    """An action chunk could not be begun before its deadline; it was not computed."""

    status = 504
