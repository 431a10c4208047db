"""SmolVLA as the engine serves it: `Servable` around `SmolVLAPolicy`."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dayshift.engine.action_api import ActionRequest, Actions, CameraImage, PolicyInfo, RunningChunk
from dayshift.engine.api import InvalidRequestError
from dayshift.engine.servable import Progress, Sharing
from dayshift.policy.smolvla.batch_runner import GROUP_SIZE, MAX_BATCH_SIZE, Batch, BatchRunner
from dayshift.policy.smolvla.guidance import Guidance, guidance_weights
from dayshift.policy.smolvla.policy import (
    ActionRequest as Observation,
)
from dayshift.policy.smolvla.policy import (
    InvalidActionRequestError,
    PreparedRequest,
    SmolVLAPolicy,
)
from dayshift.policy.smolvla.transfer import ReadBack


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedActions:
    """A checked request, on the CPU."""

    observation: PreparedRequest
    seed: int | None
    guidance: Guidance | None  # without the batch dimension


class ServedSmolVLA:
    """A loaded policy under a name. Raises DayshiftError for `sharing` that its device does not have."""

    max_batch_size = MAX_BATCH_SIZE

    def __init__(self, name: str, policy: SmolVLAPolicy, sharing: Sharing = "slices") -> None:
        settings = policy.config.policy
        self._policy = policy
        self._runner = BatchRunner(policy, runs_beside=sharing == "streams")
        can_grow = self._runner.is_asynchronous and not self._runner.runs_beside
        self.group_size = GROUP_SIZE if can_grow else None
        self._seeds = torch.Generator().manual_seed(0)
        self._unguided = Guidance(
            torch.zeros((settings.chunk_size, settings.max_action_dim)), torch.zeros((settings.chunk_size, 1))
        )
        self.info = PolicyInfo(
            name=name,
            kind="smolvla",
            cameras=policy.config.cameras,
            state_dim=policy.config.state_dim,
            action_dim=policy.config.action_dim,
            chunk_size=settings.chunk_size,
            n_action_steps=settings.n_action_steps,
        )

    def slice_s(self, batch_size: int) -> tuple[float, ...]:
        """See Servable."""
        return self._runner.slice_s(batch_size)

    def prepare(self, request: ActionRequest) -> PreparedActions:
        """Check one request. Raises InvalidRequestError."""
        try:
            observation = self._policy.prepare(
                Observation(
                    images={name: _to_array(name, image) for name, image in request.images.items()},
                    state=np.array(request.state, dtype=np.float32),
                    instruction=request.instruction,
                )
            )
        except InvalidActionRequestError as error:
            raise InvalidRequestError(str(error)) from error
        return PreparedActions(
            observation=observation,
            seed=request.seed,
            guidance=None if request.running is None else self._guidance(request.running),
        )

    def infer(
        self, batch: Sequence[PreparedActions]
    ) -> Generator[Progress, Sequence[PreparedActions] | None, Iterable[Actions]]:
        """Noise to actions, slice by slice. Members may join until the last images are embedded."""
        runner, members, waiting = self._runner, list[PreparedActions](), list(batch)
        run = runner.begin()
        while waiting:
            group, waiting = waiting[:GROUP_SIZE], waiting[GROUP_SIZE:]
            members += group
            with runner.on_its_stream():
                run.embed([member.observation for member in group])
            if not runner.runs_beside:
                may_grow = not waiting and len(members) < self.max_batch_size
                waiting += (yield Progress.OPEN if may_grow else Progress.SLICE_DONE) or ()
        with runner.on_its_stream():
            self._close(run, members)
            run.run_slice(0)
        for index in range(1, run.num_slices):
            if not runner.runs_beside:
                yield Progress.SLICE_DONE
            with runner.on_its_stream():
                run.run_slice(index)
        with runner.on_its_stream():
            actions = ReadBack(run.actions)
        if runner.runs_beside:
            while not actions.is_done():
                yield Progress.ON_ITS_WAY
        elif runner.is_asynchronous:
            yield Progress.ON_ITS_WAY  # so that the LLM's next step is there when the last slice ends
        chunks = self._policy.finish(actions.read())
        return (tuple(map(tuple, chunk.actions.tolist())) for chunk in chunks)

    def _close(self, run: Batch, members: Sequence[PreparedActions]) -> None:
        noise, guidance = self._runner.on_device(
            [self._noise(member.seed) for member in members],
            [member.guidance or self._unguided for member in members],
        )
        run.close([member.observation for member in members], noise, guidance)

    def _noise(self, seed: int | None) -> Tensor:
        """From the seed alone, so that a chunk does not depend on the batch that it was computed in."""
        settings = self._policy.config.policy
        generator = self._seeds if seed is None else torch.Generator().manual_seed(seed)
        return torch.randn((settings.chunk_size, settings.max_action_dim), generator=generator)

    def _guidance(self, running: RunningChunk) -> Guidance:
        settings = self._policy.config.policy
        target = torch.zeros((settings.chunk_size, settings.max_action_dim))
        rows, width = running.actions[: settings.chunk_size], self.info.action_dim
        if not rows or any(len(row) != width or not all(map(math.isfinite, row)) for row in rows):
            raise InvalidRequestError(f"running.actions: wanted are rows of {width} finite numbers")
        actions = torch.tensor(rows)
        if self._policy.processors.action is not None:
            actions = self._policy.processors.action.normalize(actions)
        target[: len(actions), :width] = actions
        num_guided = min(running.num_guided, len(actions))
        weights = guidance_weights(running.num_frozen, num_guided, settings.chunk_size)
        return Guidance(target, weights[:, None])


def _to_array(name: str, image: CameraImage) -> np.ndarray:
    if image.height < 1 or image.width < 1 or len(image.data) != image.height * image.width * 3:
        raise InvalidRequestError(
            f"image {name!r}: {len(image.data)} bytes are not {image.height} x {image.width} RGB pixels"
        )
    return np.frombuffer(image.data, dtype=np.uint8).reshape(image.height, image.width, 3)
