"""Which action a robot executes at which control step, out of action chunks that arrive now and then.

Action i of a chunk that was computed from the observation of control step s belongs to step s + i, whenever
it arrives: what has become late on the way is skipped, never executed late.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Chunk = NDArray[np.float32]  # (num_actions, action_dim)

ENSEMBLE_DECAY = 0.01  # ACT's m: of the actions for one step, the i-th oldest weighs exp(-m i)


class Blending(StrEnum):
    """What happens where a new chunk overlaps the running one."""

    REPLACE = "replace"  # the new one counts
    LINEAR = "linear"  # from the running to the new one over the overlap
    ENSEMBLE = "ensemble"  # weighted mean of all chunks that cover the step (ACT, arXiv:2304.13705)
    RTC = "rtc"  # the new one counts, and was computed to agree (real-time chunking, arXiv:2506.07339)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOptions:
    """How chunks are used.

    `n_action_steps` of a chunk are executed before the next one is due. If that is late, up to `n_late_steps`
    further ones are, because they were predicted for these steps; then the robot holds still.
    `n_ahead_steps` before it is due the next chunk is asked for, so that it can arrive in time.
    """

    n_action_steps: int
    n_late_steps: int = 0
    n_ahead_steps: int = 0
    blending: Blending = Blending.REPLACE


class ChunkQueue:
    """The chunks of one robot in one rollout."""

    def __init__(self, options: ChunkOptions) -> None:
        self.options = options
        self._chunks: list[tuple[int, Chunk]] = []  # (step of its first action, actions), oldest first

    def clear(self) -> None:
        """Forget everything; a new rollout begins."""
        self._chunks.clear()

    def is_due(self, step: int) -> bool:
        """Whether the next chunk should be asked for with the observation of `step`."""
        if not self._chunks:
            return True
        started_at, chunk = self._chunks[-1]
        num_used = min(self.options.n_action_steps, len(chunk))
        return step >= started_at + num_used - self.options.n_ahead_steps

    def push(self, chunk: Chunk, observed_at: int, step: int) -> bool:
        """Take a chunk that arrived before `step` was executed; False, and discarded, if it is stale."""
        usable = min(self.options.n_action_steps + self.options.n_late_steps, len(chunk))
        is_overtaken = bool(self._chunks) and observed_at < self._chunks[-1][0]
        if step >= observed_at + usable or is_overtaken:
            return False
        if self.options.blending is Blending.LINEAR:
            chunk = self._blend(chunk, observed_at, step)
        if self.options.blending is not Blending.ENSEMBLE:
            self._chunks.clear()
        self._chunks.append((observed_at, chunk))
        return True

    def action(self, step: int) -> NDArray[np.float32] | None:
        """The action of `step`; None if no chunk has a fresh one."""
        most = self.options.n_action_steps + self.options.n_late_steps
        if not self._chunks or not 0 <= step - self._chunks[-1][0] < most:
            return None
        self._chunks = [(s, chunk) for s, chunk in self._chunks if step - s < len(chunk)]
        candidates = [chunk[step - started_at] for started_at, chunk in self._chunks]
        if not candidates:
            return None
        weights = np.exp(-ENSEMBLE_DECAY * np.arange(len(candidates)))
        return np.average(candidates, axis=0, weights=weights).astype(np.float32)

    def left(self, step: int) -> Chunk | None:
        """The running chunk's actions from `step` on, for real-time chunking; None without any."""
        if not self._chunks:
            return None
        started_at, chunk = self._chunks[-1]
        left = chunk[max(0, step - started_at) :]
        return left if len(left) else None

    def _blend(self, chunk: Chunk, observed_at: int, step: int) -> Chunk:
        left = self.left(step)
        skipped = step - observed_at
        overlap = 0 if left is None else min(len(left), len(chunk) - skipped)
        if left is None or overlap <= 0:
            return chunk
        share = np.linspace(0, 1, overlap + 2, dtype=np.float32)[1:-1, None]  # of the new chunk
        blended = chunk.copy()
        new = blended[skipped : skipped + overlap]
        blended[skipped : skipped + overlap] = (1 - share) * left[:overlap] + share * new
        return blended
