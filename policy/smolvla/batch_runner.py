"""Runs SmolVLA on one batch in slices: the images of some robots at a time where there are many, the prefix,
then a few Euler steps at a time.

On a CPU each slice is computed as it comes. On CUDA each slice of each batch size is a CUDA graph over
buffers of its own; a batch is padded with empty rows to the next size. The slices go into the stream of the
LLM's steps, or into one of higher priority beside it.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dayshift.policy.smolvla.expert import PrefixCache
from dayshift.policy.smolvla.guidance import Guidance
from dayshift.policy.smolvla.model import PrefixInputs, SmolVLA
from dayshift.policy.smolvla.transfer import stack_on, to_device
from dayshift.types import DayshiftError

BATCH_SIZES = (1, 2, 4, 8, 16, 32)  # of CUDA graphs
MAX_BATCH_SIZE = BATCH_SIZES[-1]
STEPS_PER_SLICE = 2
ROBOTS_PER_SLICE = 8  # whose images are embedded in one slice

_HIGH_PRIORITY = -1  # of a CUDA stream
_NUM_MEASURED = 5  # replays of a graph that is timed
_SMOOTHING = 0.2  # weight of the newest duration in a running mean

GraphMemory = Any  # of torch.cuda.graph_pool_handle: shared by graphs that never run at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """What the slices of a batch read and write."""

    inputs: PrefixInputs
    cache: PrefixCache
    actions: Tensor  # (batch, chunk_size, max_action_dim): noise, and what the slices so far have made of it
    guidance: Guidance
    images: Tensor  # (batch, num_images, tokens_per_image, hidden_size): of `embed_images`

    @classmethod
    def allocate(cls, model: SmolVLA, inputs: PrefixInputs, noise: Tensor, guidance: Guidance) -> Buffers:
        """For a batch of inputs; its noise becomes its actions."""
        batch, num_images = inputs.image_mask.shape
        tokens = (model.config.tokens_per_image, model.config.text_shape.hidden_size)
        return cls(
            inputs=inputs,
            cache=model.allocate_cache(batch, num_images, inputs.token_ids.shape[1]),
            actions=noise,
            guidance=guidance,
            images=torch.empty((batch, num_images, *tokens), dtype=model.dtype, device=model.device),
        )


def num_image_slices(batch_size: int) -> int:
    """Slices before that of the prefix. The images of a few robots are no slices of their own."""
    return -(-batch_size // ROBOTS_PER_SLICE) if batch_size > ROBOTS_PER_SLICE else 0


def num_slices(batch_size: int, num_steps: int) -> int:
    """The images of some robots at a time, the prefix, a few Euler steps at a time."""
    return num_image_slices(batch_size) + 1 + -(-num_steps // STEPS_PER_SLICE)


def make_slices(model: SmolVLA, buffers: Buffers, batch_size: int) -> list[Callable[[], object]]:
    """The work of a batch in as many parts as one of `batch_size`, which may be larger, has."""
    inputs, cache, actions = buffers.inputs, buffers.cache, buffers.actions
    slices: list[Callable[[], object]] = []
    images: Tensor | None = None  # the prefix's slice makes them itself
    if num_groups := num_image_slices(batch_size):
        images, robots = buffers.images, -(-len(actions) // num_groups)
        for patches, out in zip(inputs.patches.split(robots), images.split(robots), strict=True):
            slices.append(lambda patches=patches, out=out: out.copy_(model.embed_images(patches)))
    slices.append(lambda: model.encode_prefix(inputs, cache, images))
    for first in range(0, model.num_steps, STEPS_PER_SLICE):
        steps = range(first, min(first + STEPS_PER_SLICE, model.num_steps))
        slices.append(
            lambda steps=steps: actions.copy_(model.denoise(actions, cache, steps, buffers.guidance))
        )
    return slices


class EagerBatch:
    """One batch, computed slice by slice. Keeps `slice_s` up, running means of what the slices take."""

    def __init__(self, model: SmolVLA, buffers: Buffers, batch_size: int, slice_s: list[float]) -> None:
        self._slices = make_slices(model, buffers, batch_size)
        self._slice_s = slice_s
        self.actions = buffers.actions
        """(batch, chunk_size, max_action_dim), normalised; what the slices so far have made of the noise."""

    @property
    def num_slices(self) -> int:
        return len(self._slices)

    def run_slice(self, index: int) -> None:
        """One of `make_slices`; in order."""
        started_at = time.monotonic()
        self._slices[index]()
        newest_s = time.monotonic() - started_at
        mean_s = self._slice_s[index] or newest_s
        self._slice_s[index] = mean_s + _SMOOTHING * (newest_s - mean_s)


class GraphBatch:
    """Static buffers and CUDA graphs for one batch size; `load` puts a batch in."""

    def __init__(
        self,
        model: SmolVLA,
        batch_size: int,
        num_images: int,
        text_length: int,
        memory: GraphMemory,
        stream: torch.cuda.Stream,
    ) -> None:
        self._num_rows = 0
        self._memory, self._stream = memory, stream
        policy, device = model.config.policy, model.device
        shape = (batch_size, policy.chunk_size, policy.max_action_dim)
        self._buffers = Buffers.allocate(
            model,
            _empty_inputs(model, batch_size, num_images, text_length),
            torch.zeros(shape, device=device),
            Guidance(torch.zeros(shape, device=device), torch.zeros((*shape[:2], 1), device=device)),
        )
        self._slices = [self._capture(run) for run in make_slices(model, self._buffers, batch_size)]
        self.slice_s = [self._measure(graph) for graph in self._slices]
        """Seconds of each slice on a device that does nothing else."""

    @property
    def num_slices(self) -> int:
        return len(self._slices)

    @property
    def actions(self) -> Tensor:
        """As `EagerBatch.actions`."""
        return self._buffers.actions[: self._num_rows]

    def load(self, inputs: PrefixInputs, noise: Tensor, guidance: Guidance) -> None:
        """Copy a batch of at most the batch size into the buffers."""
        self._num_rows = len(noise)
        for name in (field.name for field in fields(PrefixInputs)):
            self._fill(getattr(self._buffers.inputs, name), getattr(inputs, name))
        self._fill(self._buffers.actions, noise)
        self._fill(self._buffers.guidance.target, guidance.target)
        self._fill(self._buffers.guidance.weights, guidance.weights)

    def _fill(self, buffer: Tensor, rows: Tensor) -> None:
        buffer[: self._num_rows].copy_(rows, non_blocking=True)

    def run_slice(self, index: int) -> None:
        """As `EagerBatch.run_slice`; returns before the device has done it."""
        self._slices[index].replay()

    def _capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """The kernels that `run` launches. It runs once before, for what libraries set up lazily."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # On a stream of our own: cuBLAS has a workspace for each stream, which graphs captured on one share.
        # The engine's other threads may call CUDA meanwhile.
        with torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        ):
            run()
        return graph

    def _measure(self, graph: torch.cuda.CUDAGraph) -> float:
        times: list[float] = []
        for _ in range(_NUM_MEASURED):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        return statistics.median(times)


class BatchRunner:
    """Makes a started batch of inputs, the way the model's device wants it.

    `runs_beside`: on a CUDA stream of its own. Raises DayshiftError where there is none.
    """

    def __init__(
        self, model: SmolVLA, num_images: int, text_length: int, *, runs_beside: bool = False
    ) -> None:
        if runs_beside and model.device.type != "cuda":
            raise DayshiftError(
                f"sharing streams needs a CUDA device; on {model.device.type}, slices is allowed"
            )
        self._model = model
        self.runs_beside = runs_beside
        self._stream: torch.cuda.Stream | None = None
        self._slice_s = [[0.0] * num_slices(size, model.num_steps) for size in BATCH_SIZES]
        self._graphs: list[GraphBatch] = []
        if model.device.type == "cuda":
            memory = torch.cuda.graph_pool_handle()
            # Kernels keep the priority of the stream on which they were captured.
            self._stream = stream = torch.cuda.Stream(model.device, priority=_HIGH_PRIORITY)
            # The largest first: the smaller ones then fit into the memory that it left.
            self._graphs = [
                GraphBatch(model, size, num_images, text_length, memory, stream)
                for size in reversed(BATCH_SIZES)
            ][::-1]
            self._slice_s = [graph.slice_s for graph in self._graphs]
        self.text_length = text_length if self._graphs else None
        """What texts must be padded to; None: to the longest of a batch."""
        self.num_images = num_images if self._graphs else None
        """As `text_length`, for a robot's images."""

    def slice_s(self, batch_size: int) -> tuple[float, ...]:
        """Seconds of each slice of a batch of this size, as measured; 0 for one that has not run yet, and for
        one that runs beside."""
        if self.runs_beside:
            return ()
        return tuple(self._slice_s[bisect_left(BATCH_SIZES, batch_size)])

    def on_its_stream(self) -> AbstractContextManager[object]:
        """Where a batch is started, run and read."""
        return torch.cuda.stream(self._stream) if self.runs_beside else nullcontext()

    def start(
        self, inputs: PrefixInputs, noise: Tensor, guidance: Sequence[Guidance]
    ) -> EagerBatch | GraphBatch:
        """A batch that is ready for its first slice. One at a time: graphs share their buffers."""
        device, index = self._model.device, bisect_left(BATCH_SIZES, len(noise))
        joined = Guidance(
            stack_on([row.target for row in guidance], device),
            stack_on([row.weights for row in guidance], device),
        )
        noise = to_device(noise, device)
        if not self._graphs:
            buffers = Buffers.allocate(self._model, inputs, noise, joined)
            return EagerBatch(self._model, buffers, BATCH_SIZES[index], self._slice_s[index])
        batch = self._graphs[index]
        batch.load(inputs, noise, joined)
        return batch


def _empty_inputs(model: SmolVLA, batch_size: int, num_images: int, text_length: int) -> PrefixInputs:
    config, device = model.config, model.device
    policy, patches = config.policy, (batch_size, num_images, *config.patch_shape.of_image)
    return PrefixInputs(
        patches=torch.zeros(patches, dtype=model.dtype, device=device),
        image_mask=torch.zeros((batch_size, num_images), dtype=torch.bool, device=device),
        empty_mask=torch.zeros((batch_size, policy.empty_cameras), dtype=torch.bool, device=device),
        token_ids=torch.zeros((batch_size, text_length), dtype=torch.int64, device=device),
        token_mask=torch.zeros((batch_size, text_length), dtype=torch.bool, device=device),
        state=torch.zeros((batch_size, policy.max_state_dim), device=device),
    )
