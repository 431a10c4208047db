"""Many robots that think, call, and think again: `dayshift bench robots`. A closed loop, as in operation.

Each robot has a long history with its planner. It sends a turn of new tokens, waits for all of the reply,
thinks for an exponentially distributed time, and calls again. Against this engine a robot calls its
session; against another server it sends its whole history with each call.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RobotsLoad:
    """What each robot does. Lengths are in tokens.

    Histories are spread evenly from 0.4 to 1.6 times `history_tokens`, the same for every server; the
    system prompt is common to all. Calls of the first third of `duration_s` are not measured.
    `cuts_history`: a robot that sends its history keeps it to the window itself, as a session does: its
    oldest turns leave, down to three quarters of the window. Otherwise it sends all of it.
    """

    vocab_size: int
    duration_s: float = 60.0
    think_s: float = 5.0  # the mean
    new_tokens: int = 102
    generated_tokens: int = 40
    history_tokens: int = 10_000
    system_tokens: int = 600
    window: int = 8192
    cuts_history: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShares:
    """Where the context of the measured calls came from, new tokens left out; the shares add up to 1."""

    gpu: float  # was there already
    host: float  # parked in host memory
    disk: float
    recomputed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RobotsRow:
    """What was measured with so many robots.

    Waits and sources are those of the `num_calls` answered calls that began in the measured time,
    `calls_per_s` counts the replies that ended in it. `sources` None: the server does not tell.
    `num_wrong_sessions`: their turns are not those that the robot took, in number or in tokens.
    """

    num_robots: int
    num_calls: int
    num_failures: int
    calls_per_s: float
    p50_s: float  # of the whole reply
    p95_s: float
    first_token_p50_s: float
    first_token_p95_s: float
    token_gap_p95_s: float  # between two pieces of one reply
    token_gap_p99_s: float
    prompt_tokens: float  # the mean of a call's context
    computed_tokens: float  # the mean that was computed for it, new ones included
    sources: SourceShares | None
    num_wrong_sessions: int = 0
