"""What the engine tells its workers, in the order in which it does the same itself, and what they answer.

`runner`: 0 is the engine's own, others are on small pools (`OpenRunner`).
"""

from __future__ import annotations

import msgspec

from dayshift.engine.step_graphs import StepInputs, StepShape


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """Compute a step. `tables`: the rows of the block tables that have changed, and their block ids.

    `has_token_ids`: the first tokens are broadcast by rank 0, which has them on the device only.
    """

    runner: int
    inputs: StepInputs
    shape: StepShape
    tables: list[tuple[int, list[int]]]
    has_token_ids: bool


class ReadKV(msgspec.Struct, frozen=True, tag=True):
    """Send this rank's heads of some slots to rank 0."""

    runner: int
    slots: list[int]


class WriteKV(msgspec.Struct, frozen=True, tag=True):
    """Take this rank's heads of some slots from rank 0."""

    runner: int
    slots: list[int]


class CopyBlock(msgspec.Struct, frozen=True, tag=True):
    """Copy a block of the pool onto another."""

    runner: int
    source: int
    target: int


class OpenRunner(msgspec.Struct, frozen=True, tag=True):
    """Open a runner on a pool of its own, in the place of an older one of this number."""

    runner: int
    num_tokens: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered with Pong when all that was told before is done, on the device too."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End."""


ToWorker = RunStep | ReadKV | WriteKV | CopyBlock | OpenRunner | Ping | Stop


class Started(msgspec.Struct, frozen=True, tag=True):
    """The process is there; it joins the group next."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """See Ping."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker ends, and why, in one line."""

    message: str


FromWorker = Started | Ready | Pong | Failed
