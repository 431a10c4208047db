"""What is cheaper for a parked session: to read its KV back, or to compute it again from its text.

The answer differs by model and machine: for a mixture of experts with few active parameters, a disk can
be slower than the GPU. So the engine measures once, when it starts, and decides per call. What a disk is
busy with, and how much slower than at the start it was during the last minute, counts too; and so does that
a prompt is computed in small steps while others decode.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from dayshift.engine.sessions.stored_piece import Tier


@dataclass(frozen=True, slots=True)
class ReadTime:
    """Reading a piece, as one of many, takes `fixed_s`, and `s_per_token` for each of its tokens."""

    fixed_s: float
    s_per_token: float

    def of(self, num_tokens: int) -> float:
        """Seconds for one piece."""
        return self.fixed_s + self.s_per_token * num_tokens


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """Measured times of steps: (tokens, seconds), ascending; straight lines between and beyond them.

    Small steps cost nearly as much as larger ones where reading the weights is what takes the time, so
    one rate would not do.
    """

    points: tuple[tuple[int, float], ...]

    def in_steps(self, num_tokens: int, most: int) -> float:
        """Seconds to compute this many tokens, at most `most` of them in a step."""
        num_full, num_left = divmod(num_tokens, most)
        return num_full * self.of(most) + (self.of(num_left) if num_left else 0.0)

    def of(self, num_tokens: int) -> float:
        """Seconds to compute this many tokens in one step."""
        tokens = [point[0] for point in self.points]
        if len(tokens) == 1:
            return self.points[0][1] * num_tokens / tokens[0]
        right = min(max(bisect_left(tokens, num_tokens), 1), len(tokens) - 1)
        (low, low_s), (high, high_s) = self.points[right - 1], self.points[right]
        return max(0.0, low_s + (high_s - low_s) * (num_tokens - low) / (high - low))


@dataclass(frozen=True, slots=True)
class SavedEntry:
    """A turn whose KV can be read: its tokens, and where it is."""

    num_tokens: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class ArchiveLoad:
    """What archives are busy with, and how fast they were lately.

    `num_readers` pieces are read at once. `queued`: tokens of pieces that are read before any other.
    `recent`: tokens of pieces that were read lately, and the seconds that each took.
    """

    num_readers: int = 1
    queued: tuple[int, ...] = ()
    recent: tuple[tuple[int, float], ...] = ()


IDLE = ArchiveLoad()


@dataclass(frozen=True, slots=True)
class RestoreCost:
    """The measured times, and the decision."""

    read: dict[Tier, ReadTime]
    prefill: PrefillTime

    def num_to_read(
        self, saved: Sequence[SavedEntry], num_new: int, *, step_tokens: int, load: ArchiveLoad = IDLE
    ) -> int:
        """How many of the saved entries, from the first, are to be read; the rest is computed again.

        `num_new` tokens are computed after them in any case. A step computes up to `step_tokens` tokens.
        """
        host_s, archived_s = 0.0, list[float]()
        num_left = sum(entry.num_tokens for entry in saved)
        costs = [self.prefill.in_steps(num_left + num_new, step_tokens)]
        for entry in saved:
            if entry.tier is Tier.ARCHIVE:
                archived_s.append(self.read[Tier.ARCHIVE].of(entry.num_tokens))
            else:
                host_s += self.read[entry.tier].of(entry.num_tokens)
            num_left -= entry.num_tokens
            read_s = host_s + self._wait_s(archived_s, load)
            costs.append(read_s + self.prefill.in_steps(num_left + num_new, step_tokens))
        return min(range(len(costs)), key=lambda index: (costs[index], -index))

    def is_sooner_read(self, pieces: Sequence[int], *, num_readers: int) -> bool:
        """Whether pieces of so many tokens are read from idle archives, `num_readers` at once, before one
        step has computed them."""
        alone = self.read[Tier.ARCHIVE].of
        return self._wait_s([*map(alone, pieces)], ArchiveLoad(num_readers)) < self.prefill.of(sum(pieces))

    def _wait_s(self, archived_s: Sequence[float], load: ArchiveLoad) -> float:
        """Until pieces of archives are there, each of which takes so long on an idle disk."""
        if not archived_s:
            return 0.0
        alone = self.read[Tier.ARCHIVE].of
        recent_s, expected_s = 0.0, 0.0
        for num_tokens, seconds in load.recent:
            recent_s, expected_s = recent_s + seconds, expected_s + alone(num_tokens)
        slowdown = recent_s / expected_s if expected_s else 1.0
        total_s = sum(map(alone, load.queued)) + sum(archived_s)
        return slowdown * max(*archived_s, total_s / load.num_readers)
