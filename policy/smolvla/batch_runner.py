"""Runs SmolVLA on one batch in slices: the prefix, then a few Euler steps at a time.

On a CPU each slice is computed as it comes. On CUDA each slice of each batch size is a CUDA graph over
buffers of its own; a batch is padded with empty rows to the next size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from dayshift.policy.smolvla.guidance import Guidance
from dayshift.policy.smolvla.model import PrefixInputs, SmolVLA

BATCH_SIZES = (1, 2, 4, 8, 16, 32)  # of CUDA graphs
MAX_BATCH_SIZE = BATCH_SIZES[-1]
STEPS_PER_SLICE = 2

GraphMemory = Any  # of torch.cuda.graph_pool_handle: shared by graphs that never run at the same time


def step_slices(num_steps: int) -> tuple[range, ...]:
    """The Euler steps of each slice after the prefix."""
    return tuple(
        range(first, min(first + STEPS_PER_SLICE, num_steps))
        for first in range(0, num_steps, STEPS_PER_SLICE)
    )


class EagerBatch:
    """One batch, computed slice by slice."""

    def __init__(self, model: SmolVLA, inputs: PrefixInputs, noise: Tensor, guidance: Guidance) -> None:
        batch, num_images = inputs.image_mask.shape
        self._model, self._inputs, self._guidance = model, inputs, guidance
        self._cache = model.allocate_cache(batch, num_images, inputs.token_ids.shape[1])
        self.actions = noise
        """(batch, chunk_size, max_action_dim), normalised; what the slices so far have made of the noise."""

    def run_prefix(self) -> None:
        """The first slice."""
        self._model.encode_prefix(self._inputs, self._cache)

    def run_steps(self, index: int) -> None:
        """Slice `index` of `step_slices`."""
        steps = step_slices(self._model.num_steps)[index]
        self.actions = self._model.denoise(self.actions, self._cache, steps, self._guidance)


class GraphBatch:
    """Static buffers and CUDA graphs for one batch size; `load` puts a batch in."""

    def __init__(
        self, model: SmolVLA, batch_size: int, num_images: int, text_length: int, memory: GraphMemory
    ) -> None:
        self._num_rows = 0
        self._memory = memory
        self._inputs = _empty_inputs(model, batch_size, num_images, text_length)
        self._cache = model.allocate_cache(batch_size, num_images, text_length)
        policy, device = model.config.policy, model.device
        shape = (batch_size, policy.chunk_size, policy.max_action_dim)
        self._actions = torch.zeros(shape, device=device)
        self._guidance = Guidance(
            torch.zeros(shape, device=device), torch.zeros((*shape[:2], 1), device=device)
        )
        self._prefix = self._capture(lambda: model.encode_prefix(self._inputs, self._cache))
        self._steps = [self._capture_steps(model, steps) for steps in step_slices(model.num_steps)]

    @property
    def actions(self) -> Tensor:
        """As `EagerBatch.actions`."""
        return self._actions[: self._num_rows]

    def load(self, inputs: PrefixInputs, noise: Tensor, guidance: Guidance) -> None:
        """Copy a batch of at most the batch size into the buffers."""
        self._num_rows = len(noise)
        for name in (field.name for field in fields(PrefixInputs)):
            buffer = getattr(self._inputs, name)
            buffer[: self._num_rows].copy_(getattr(inputs, name), non_blocking=True)
        self._actions[: self._num_rows].copy_(noise, non_blocking=True)
        self._guidance.target[: self._num_rows].copy_(guidance.target, non_blocking=True)
        self._guidance.weights[: self._num_rows].copy_(guidance.weights, non_blocking=True)

    def run_prefix(self) -> None:
        """The first slice."""
        self._prefix.replay()

    def run_steps(self, index: int) -> None:
        """Slice `index` of `step_slices`."""
        self._steps[index].replay()

    def _capture_steps(self, model: SmolVLA, steps: range) -> torch.cuda.CUDAGraph:
        return self._capture(
            lambda: self._actions.copy_(model.denoise(self._actions, self._cache, steps, self._guidance))
        )

    def _capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """The kernels that `run` launches. It runs once before, for what libraries set up lazily."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            run()
        return graph


class BatchRunner:
    """Makes a started batch of inputs, the way the model's device wants it."""

    def __init__(self, model: SmolVLA, num_images: int, text_length: int) -> None:
        self._model = model
        self._graphs: dict[int, GraphBatch] = {}
        if model.device.type == "cuda":
            memory = torch.cuda.graph_pool_handle()
            self._graphs = {
                size: GraphBatch(model, size, num_images, text_length, memory)
                for size in reversed(BATCH_SIZES)
            }
        self.text_length = text_length if self._graphs else None
        """What texts must be padded to; None: to the longest of a batch."""
        self.num_images = num_images if self._graphs else None
        """As `text_length`, for a robot's images."""

    def start(
        self, inputs: PrefixInputs, noise: Tensor, guidance: Sequence[Guidance]
    ) -> EagerBatch | GraphBatch:
        """A batch that is ready for its first slice. One at a time: graphs share their buffers."""
        joined = Guidance(
            torch.stack([row.target for row in guidance]).to(self._model.device),
            torch.stack([row.weights for row in guidance]).to(self._model.device),
        )
        noise = noise.to(self._model.device)
        if not self._graphs:
            return EagerBatch(self._model, inputs, noise, joined)
        batch = self._graphs[min(size for size in self._graphs if size >= len(noise))]
        batch.load(inputs, noise, joined)
        return batch


def _empty_inputs(model: SmolVLA, batch_size: int, num_images: int, text_length: int) -> PrefixInputs:
    config, device = model.config, model.device
    side, policy = config.image_side, config.policy
    return PrefixInputs(
        images=torch.zeros((batch_size, num_images, 3, side, side), device=device),
        image_mask=torch.zeros((batch_size, num_images), dtype=torch.bool, device=device),
        empty_mask=torch.zeros((batch_size, policy.empty_cameras), dtype=torch.bool, device=device),
        token_ids=torch.zeros((batch_size, text_length), dtype=torch.int64, device=device),
        token_mask=torch.zeros((batch_size, text_length), dtype=torch.bool, device=device),
        state=torch.zeros((batch_size, policy.max_state_dim), device=device),
    )
