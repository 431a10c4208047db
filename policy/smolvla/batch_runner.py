"""Runs SmolVLA on one batch in slices: the images of some robots at a time, the prefix, then a few Euler
steps at a time. Members may join a batch until its last images have been embedded.

On a CPU each slice is computed as it comes. On CUDA each slice is a CUDA graph for some batch sizes, over
buffers that all share; a batch is padded with what they hold to the next size. The slices go into the
stream of the LLM's steps, or into one of higher priority beside it.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dayshift.policy.smolvla.expert import PrefixCache
from dayshift.policy.smolvla.guidance import Guidance
from dayshift.policy.smolvla.images import fill_patches
from dayshift.policy.smolvla.model import PrefixInputs, SmolVLA
from dayshift.policy.smolvla.policy import PreparedRequest, SmolVLAPolicy
from dayshift.policy.smolvla.transfer import stack_on, to_device
from dayshift.types import DayshiftError

BATCH_SIZES = (1, 2, 4, 8, 16, 24)  # of CUDA graphs
# A larger one would save little of the device's time, and let the first wait for the last.
MAX_BATCH_SIZE = BATCH_SIZES[-1]
STEPS_PER_SLICE = 2
GROUP_SIZE = 8  # robots whose images are embedded in one slice

_HIGH_PRIORITY = -1  # of a CUDA stream
_NUM_MEASURED = 5  # replays of a graph that is timed
_SMOOTHING = 0.2  # weight of the newest duration in a running mean


def groups_of(batch_size: int) -> list[int]:
    """How many robots' images are embedded in each of a batch's first slices."""
    return [min(GROUP_SIZE, batch_size - first) for first in range(0, batch_size, GROUP_SIZE)]


def num_slices(batch_size: int, num_steps: int) -> int:
    """The images of some robots at a time, the prefix, a few Euler steps at a time."""
    return len(groups_of(batch_size)) + 1 + -(-num_steps // STEPS_PER_SLICE)


def padded_size(num_robots: int) -> int:
    """The next of the batch sizes."""
    return BATCH_SIZES[bisect_left(BATCH_SIZES, num_robots)]


@dataclass(slots=True)
class SliceTimes:
    """Seconds of each slice, by batch size; 0 for one that has not run yet."""

    images_s: dict[int, float] = field(default_factory=dict)
    rest_s: dict[int, list[float]] = field(default_factory=dict)

    @classmethod
    def unknown(cls, num_steps: int) -> SliceTimes:
        rest = num_slices(0, num_steps)
        return cls(dict.fromkeys(BATCH_SIZES, 0.0), {size: [0.0] * rest for size in BATCH_SIZES})

    def of(self, batch_size: int) -> tuple[float, ...]:
        """Of a whole batch, in order."""
        images = [self.images_s[padded_size(group)] for group in groups_of(batch_size)]
        return (*images, *self.rest_s[padded_size(batch_size)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """What the slices behind the images read and write."""

    inputs: PrefixInputs
    cache: PrefixCache
    actions: Tensor  # (batch, chunk_size, max_action_dim): noise, and what the slices so far have made of it
    guidance: Guidance

    def slices(self, model: SmolVLA) -> list[Callable[[], object]]:
        """The prefix, then some Euler steps at a time."""
        actions, cache, guidance = self.actions, self.cache, self.guidance
        slices: list[Callable[[], object]] = [lambda: model.encode_prefix(self.inputs, cache)]
        for first in range(0, model.num_steps, STEPS_PER_SLICE):
            steps = range(first, min(first + STEPS_PER_SLICE, model.num_steps))
            slices.append(lambda steps=steps: actions.copy_(model.denoise(actions, cache, steps, guidance)))
        return slices


class Batch(Protocol):
    """A batch on its way: the images of each group of members, `close`, then slice by slice."""

    @property
    def num_slices(self) -> int:
        """Behind those of the images."""
        ...

    @property
    def actions(self) -> Tensor:
        """(batch, chunk_size, max_action_dim), normalised; what the slices so far have made of the noise."""
        ...

    def embed(self, group: Sequence[PreparedRequest]) -> None:
        """The images of the next members, at most `GROUP_SIZE`. On CUDA it returns before that is done, and
        so does `run_slice`."""
        ...

    def close(self, members: Sequence[PreparedRequest], noise: Tensor, guidance: Guidance) -> None:
        """All members whose images have been embedded, in that order; noise and guidance on the device."""
        ...

    def run_slice(self, index: int) -> None:
        """In order."""
        ...


class EagerBatch:
    """`Batch`, computed at once. Keeps `times` up, as running means."""

    def __init__(self, policy: SmolVLAPolicy, times: SliceTimes) -> None:
        self._policy, self._times = policy, times
        self._images: list[Tensor] = []
        self._slices: list[Callable[[], object]] = []
        self._rest_s: list[float] = []
        self.actions = torch.empty(0)

    @property
    def num_slices(self) -> int:
        return len(self._slices)

    def embed(self, group: Sequence[PreparedRequest]) -> None:
        size, started_at = padded_size(len(group)), time.monotonic()
        self._images.append(self._policy.embed_images(group))
        self._times.images_s[size] = _mean(self._times.images_s[size], time.monotonic() - started_at)

    def close(self, members: Sequence[PreparedRequest], noise: Tensor, guidance: Guidance) -> None:
        model, most = self._policy.model, max(images.shape[1] for images in self._images)
        padded = [F.pad(images, (0, 0, 0, 0, 0, most - images.shape[1])) for images in self._images]
        inputs = self._policy.collate(members, torch.cat(padded))
        cache = model.allocate_cache(len(members), most, inputs.token_ids.shape[1])
        buffers = Buffers(inputs=inputs, cache=cache, actions=noise, guidance=guidance)
        self._slices, self.actions = buffers.slices(model), noise
        self._rest_s = self._times.rest_s[padded_size(len(members))]

    def run_slice(self, index: int) -> None:
        started_at = time.monotonic()
        self._slices[index]()
        self._rest_s[index] = _mean(self._rest_s[index], time.monotonic() - started_at)


def _mean(mean_s: float, newest_s: float) -> float:
    return newest_s if mean_s == 0.0 else mean_s + _SMOOTHING * (newest_s - mean_s)


class GraphBatch:
    """`Batch`, one at a time, in static buffers and by CUDA graphs. `begin` empties it for the next."""

    def __init__(self, policy: SmolVLAPolicy, stream: torch.cuda.Stream) -> None:
        self._policy, model = policy, policy.model
        self._text_length = policy.processors.max_text_length
        self._num_images = len(policy.config.cameras)
        self._num_robots = 0
        self._patches = torch.zeros(
            (GROUP_SIZE, self._num_images, *model.config.patch_shape.of_image),
            dtype=model.dtype,
            device=model.device,
        )
        tokens = (model.config.tokens_per_image, model.config.text_shape.hidden_size)
        self._group = self._patches.new_zeros((GROUP_SIZE, self._num_images, *tokens))
        self._buffers = self._allocate()
        memory = torch.cuda.graph_pool_handle()  # of graphs that never run at the same time
        # The largest first: the smaller ones then fit into the memory that it left.
        self._embed = {
            size: _Graph(lambda size=size: self._embed_group(size), memory, stream)
            for size in reversed(BATCH_SIZES)
            if size <= GROUP_SIZE
        }
        self._rest = {
            size: [_Graph(run, memory, stream) for run in self._first(size).slices(model)]
            for size in reversed(BATCH_SIZES)
        }
        self.times = SliceTimes(
            {size: graph.seconds for size, graph in self._embed.items()},
            {size: [graph.seconds for graph in graphs] for size, graphs in self._rest.items()},
        )
        """On a device that does nothing else."""

    @property
    def num_slices(self) -> int:
        return len(self._rest[MAX_BATCH_SIZE])

    @property
    def actions(self) -> Tensor:
        return self._buffers.actions[: self._num_robots]

    def begin(self) -> GraphBatch:
        """Empty, for the next batch."""
        self._num_robots = 0
        return self

    def embed(self, group: Sequence[PreparedRequest]) -> None:
        first, size = self._num_robots, len(group)
        self._num_robots += size
        images = self._policy.placed_images(group, self._num_images)
        fill_patches(images, self._policy.config.patch_shape, self._patches.flatten(0, 1))
        self._embed[padded_size(size)].replay()
        self._buffers.inputs.images[first : self._num_robots].copy_(self._group[:size])

    def close(self, members: Sequence[PreparedRequest], noise: Tensor, guidance: Guidance) -> None:
        buffers, number = self._buffers, len(members)
        inputs = self._policy.collate(members, buffers.inputs.images[:number], text_length=self._text_length)
        for name in ("image_mask", "empty_mask", "token_ids", "token_mask", "state"):
            getattr(buffers.inputs, name)[:number].copy_(getattr(inputs, name))
        buffers.actions[:number].copy_(noise)
        buffers.guidance.target[:number].copy_(guidance.target)
        buffers.guidance.weights[:number].copy_(guidance.weights)

    def run_slice(self, index: int) -> None:
        self._rest[padded_size(self._num_robots)][index].replay()

    def _embed_group(self, size: int) -> None:
        self._group[:size].copy_(self._policy.model.embed_images(self._patches[:size]))

    def _allocate(self) -> Buffers:
        model, size = self._policy.model, MAX_BATCH_SIZE
        settings, device = model.config.policy, model.device
        chunk = (size, settings.chunk_size, settings.max_action_dim)
        inputs = PrefixInputs(
            images=self._group.new_zeros((size, *self._group.shape[1:])),
            image_mask=torch.zeros((size, self._num_images), dtype=torch.bool, device=device),
            empty_mask=torch.zeros((size, settings.empty_cameras), dtype=torch.bool, device=device),
            token_ids=torch.zeros((size, self._text_length), dtype=torch.int64, device=device),
            token_mask=torch.zeros((size, self._text_length), dtype=torch.bool, device=device),
            state=torch.zeros((size, settings.max_state_dim), device=device),
        )
        return Buffers(
            inputs=inputs,
            cache=model.allocate_cache(size, self._num_images, self._text_length),
            actions=torch.zeros(chunk, device=device),
            guidance=Guidance(torch.zeros(chunk, device=device), torch.zeros((*chunk[:2], 1), device=device)),
        )

    def _first(self, size: int) -> Buffers:
        """The part of the buffers that belongs to the first robots."""
        inputs, guidance = self._buffers.inputs, self._buffers.guidance
        return Buffers(
            inputs=PrefixInputs(
                images=inputs.images[:size],
                image_mask=inputs.image_mask[:size],
                empty_mask=inputs.empty_mask[:size],
                token_ids=inputs.token_ids[:size],
                token_mask=inputs.token_mask[:size],
                state=inputs.state[:size],
            ),
            cache=self._buffers.cache.first(size),
            actions=self._buffers.actions[:size],
            guidance=Guidance(guidance.target[:size], guidance.weights[:size]),
        )


class _Graph:
    """The kernels that `run` launches, and how many seconds they take by themselves.

    It runs once before, for what libraries set up lazily.
    """

    def __init__(self, run: Callable[[], object], memory: Any, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # On a stream of our own: cuBLAS has a workspace for each stream, which graphs captured on one share.
        # The engine's other threads may call CUDA meanwhile.
        with torch.cuda.graph(self._graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
            run()
        self.seconds = statistics.median(self._measure() for _ in range(_NUM_MEASURED))

    def replay(self) -> None:
        """Launch them."""
        self._graph.replay()

    def _measure(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000


class BatchRunner:
    """Begins batches, the way the model's device wants it.

    `runs_beside`: on a CUDA stream of its own. Raises DayshiftError where there is none.
    """

    def __init__(self, policy: SmolVLAPolicy, *, runs_beside: bool = False) -> None:
        device = policy.model.device
        if runs_beside and device.type != "cuda":
            raise DayshiftError(f"sharing streams needs a CUDA device; on {device.type}, slices is allowed")
        self._policy = policy
        self.runs_beside = runs_beside
        self._stream: torch.cuda.Stream | None = None
        self._graphs: GraphBatch | None = None
        self._times = SliceTimes.unknown(policy.model.num_steps)
        if device.type == "cuda":
            # Kernels keep the priority of the stream on which they were captured.
            self._stream = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)
            self._graphs = GraphBatch(policy, self._stream)
            self._times = self._graphs.times

    @property
    def is_asynchronous(self) -> bool:
        """Slices are launched, and done while the host does something else."""
        return self._graphs is not None

    def slice_s(self, batch_size: int) -> tuple[float, ...]:
        """Seconds of each slice of a batch of this size, as measured; 0 for one that has not run yet, and for
        one that runs beside."""
        return () if self.runs_beside else self._times.of(batch_size)

    def on_its_stream(self) -> AbstractContextManager[object]:
        """Where a batch is begun, run and read."""
        return torch.cuda.stream(self._stream) if self.runs_beside else nullcontext()

    def begin(self) -> Batch:
        """An empty batch. One at a time: graphs share their buffers."""
        return EagerBatch(self._policy, self._times) if self._graphs is None else self._graphs.begin()

    def on_device(self, noise: Sequence[Tensor], guidance: Sequence[Guidance]) -> tuple[Tensor, Guidance]:
        """Of all members, as `Batch.close` takes them."""
        device = self._policy.model.device
        joined = Guidance(
            stack_on([row.target for row in guidance], device),
            stack_on([row.weights for row in guidance], device),
        )
        return to_device(torch.stack(list(noise)), device), joined
