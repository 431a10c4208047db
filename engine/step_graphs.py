"""One forward pass of the decoder as a function of one packed tensor, and CUDA graphs of it.

A graph launches a whole step at the cost of one launch. It needs shapes that do not change, so a step
is padded to the next of a few shapes that were captured at start; padding tokens belong to no
sequence and write nothing. Steps that fit no shape run without a graph, through the same function.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from dayshift.engine import kernels
from dayshift.engine.block_pool import BlockPool
from dayshift.engine.block_tables import BlockTables
from dayshift.engine.kernels.ahead import compile_ahead
from dayshift.engine.kernels.prompt_attention import PromptPlanner
from dayshift.engine.models.decoder import AttentionBatch, Decoder
from dayshift.engine.side_copies import upload
from dayshift.engine.startup import phase

_MAX_GRAPH_TOKENS = 1024  # beyond it a prefill step takes longer than its launches
_MAX_GRAPH_PROMPT = 4096  # a small model's whole prompt takes longer than its launches only beyond this
# Of prompts without a graph: finer steps are no faster, and the first prompt of a new length takes some 60 ms
# more, which is cuDNN's.
_PROMPT_ALIGNMENT = 128
_PROMPT_STEP = 64  # between captured prompts, for which cuDNN has made its plans at the start
_MAX_VERIFY_TOKENS = 128  # of a step that is captured with logits of every token
_FIRST_CONTEXT, _CONTEXT_FACTOR = 2048, 4


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """What a step's launches depend on. A decode step has as many tokens as sequences, every other step
    more, padding included: attention chooses its kernels by that."""

    num_tokens: int
    num_seqs: int
    num_blocks: int  # of the longest context
    is_prompt: bool = False  # every sequence begins in this step
    num_drafts: int = 0  # tokens with logits, beside the last one of each sequence

    @property
    def num_logits(self) -> int:
        """Rows of logits."""
        return self.num_seqs + self.num_drafts

    @property
    def num_inputs(self) -> int:
        """Length of the packed inputs, see `StepInputs.pack`."""
        return self.num_tokens + 3 * self.num_seqs + 1 + self.num_logits


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step in host memory. `rows` are those of the block tables; sequence i brings the tokens
    `query_start[i]` .. `query_start[i + 1]`, the first of them at position `starts[i]`. Its last token has
    logits, and so have the `num_drafts[i]` before it."""

    token_ids: list[int]
    rows: list[int]
    starts: list[int]
    query_start: list[int]
    num_drafts: list[int]

    @property
    def num_queries(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(end - start for start, end in pairwise(self.query_start))

    def prompt_lengths(self, num_tokens: int) -> tuple[int, ...]:
        """`num_queries`, with the padding of a step of so many tokens counted to the last sequence."""
        *first, last = self.num_queries
        return (*first, last + num_tokens - len(self.token_ids))

    def pack(self, shape: StepShape, padding_row: int, *, pin_memory: bool) -> Tensor:
        """int64 (shape.num_inputs,): token ids, rows, starts, query_start and the places of the tokens with
        logits, each padded."""
        num_seqs = shape.num_seqs - len(self.rows)
        ends = zip(self.query_start[1:], self.num_drafts, strict=True)
        places = [place for end, num_drafts in ends for place in range(end - 1 - num_drafts, end)]
        values = [
            *self.token_ids,
            *[0] * (shape.num_tokens - len(self.token_ids)),
            *self.rows,
            *[padding_row] * num_seqs,
            *self.starts,
            *[0] * num_seqs,
            *self.query_start,
            *self.query_start[-1:] * num_seqs,
            *places,
            *[0] * (shape.num_logits - len(places)),
        ]
        return torch.tensor(values, dtype=torch.int64, pin_memory=pin_memory)


@torch.inference_mode()
def compute_step(
    model: Decoder,
    pool: BlockPool,
    tables: BlockTables,
    inputs: Tensor,
    shape: StepShape,
    prompt_lengths: tuple[int, ...] | None = None,
) -> Tensor:
    """Compute and store a step's KV; logits (num_logits, vocab_size), sequence by sequence.

    `inputs` is int64 (num_inputs,) on the device; nothing here is read back to the host.
    `prompt_lengths` as in `AttentionBatch`; they may count padding tokens to the last sequence, which
    stand behind everything that attends.
    """
    token_ids, rows, starts, query_start, places = inputs.split(
        [shape.num_tokens, shape.num_seqs, shape.num_seqs, shape.num_seqs + 1, shape.num_logits]
    )
    placement = kernels.place_step(
        rows, starts, query_start, tables.ids, shape.num_tokens, shape.num_blocks, pool.block_size
    )
    batch = AttentionBatch(**placement._asdict(), prompt_lengths=prompt_lengths)
    # Without drafts, each sequence's last token has logits, and in a decode step it has no other.
    last_tokens = places if shape.num_logits == shape.num_seqs < shape.num_tokens else None
    hidden = model(token_ids, batch, pool.kv, lambda layer: pool.land(layer + 1), last_tokens)
    # In a decode step every token has logits.
    has_all = last_tokens is not None or shape.num_tokens == shape.num_seqs
    return model.logits(hidden if has_all else hidden[places])


class StepGraphs:
    """The captured shapes of `compute_step` for one model and pool, on a CUDA device."""

    def __init__(self, model: Decoder, pool: BlockPool, tables: BlockTables, *, max_context: int) -> None:
        self.model, self.pool, self.tables = model, pool, tables
        self.batch_sizes = batch_sizes(tables.num_rows)
        self.contexts = [pool.num_blocks_for(length) for length in context_lengths(max_context)]
        num_inputs = most_inputs(self.batch_sizes, self.contexts)
        self._inputs = torch.zeros(num_inputs, dtype=torch.int64, device=pool.kv.device)
        self._memory = torch.cuda.graph_pool_handle()
        self._captured: dict[StepShape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._planner: PromptPlanner | None = None  # lives as long as they

    def shape_for(self, shape: StepShape) -> StepShape | None:
        """The smallest captured shape that holds this one; None: run it without a graph."""
        fit = fitting_shape(shape, self.batch_sizes, self.contexts)
        return fit if fit in self._captured else None

    def capture(self, max_context: int) -> None:
        """Capture every shape for contexts of up to this many tokens, the largest first: the smaller ones
        then fit into the memory that it left.

        What the captures need is compiled before, all at once, and run once in layers of each kind, because
        libraries that choose their algorithm at the first call cannot do that in a capture. Whole prompts
        come last, and in a thread of their own, which has planned their attention meanwhile."""
        contexts = self.contexts[: bisect_left(self.contexts, self.pool.num_blocks_for(max_context)) + 1]
        shapes = sorted(all_shapes(self.batch_sizes, contexts), reverse=True)
        uncaptured = list(uncaptured_shapes(contexts))
        prompts = [shape for shape in shapes if shape.is_prompt]
        others = [shape for shape in shapes if not shape.is_prompt]
        kinds = self.model.one_layer_of_each_kind()
        self._planner = planner = PromptPlanner(self._inputs.device)
        with phase("compile") as clock, planner.attends():
            clock.num_compiled += compile_ahead(lambda: self._run([*shapes, *uncaptured], kinds))
        with phase("graphs") as clock:
            stream = torch.cuda.Stream()
            self._run_and_capture(others, kinds, stream)
            planner.run(lambda: self._run_and_capture(prompts, kinds, stream))
            self._run([shape for shape in uncaptured if shape.is_prompt], kinds)  # with plans of this thread
            clock.num_graphs += len(shapes)

    def run(self, shape: StepShape, inputs: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Replay a captured shape. The logits are overwritten by the next replay of any shape.

        `inputs` are in pinned host memory; `token_ids`, on the device, take the places of their first.
        """
        graph, logits = self._captured[shape]
        place = self._inputs[: shape.num_inputs]
        if token_ids is None:
            place.copy_(inputs, non_blocking=True)
        else:
            torch.cat((token_ids, upload(inputs, place.device)[len(token_ids) :]), out=place)
        graph.replay()
        return logits

    def _run_and_capture(self, shapes: list[StepShape], kinds: Decoder, stream: torch.cuda.Stream) -> None:
        self._run(shapes, kinds)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # graphs have memory of their own
        for shape in shapes:
            self._capture(shape, stream)

    def _capture(self, shape: StepShape, stream: torch.cuda.Stream) -> None:
        self.put_padding(shape)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # Other threads use the device meanwhile: NCCL's own, and the one that plans prompts.
            graph.capture_begin(self._memory, "thread_local")
            try:
                logits = self._launch(shape, self.model)
            finally:
                graph.capture_end()
        self._captured[shape] = (graph, logits)

    def _run(self, shapes: list[StepShape], model: Decoder) -> None:
        for shape in shapes:
            self.put_padding(shape)
            self._launch(shape, model)

    def put_padding(self, shape: StepShape) -> Tensor:
        """Let the step's inputs, which are returned, be nothing but padding, which writes nothing."""
        empty = StepInputs(token_ids=[], rows=[], starts=[], query_start=[0], num_drafts=[])
        packed = empty.pack(shape, self.tables.padding_row, pin_memory=False)
        return self._inputs[: shape.num_inputs].copy_(packed)

    def _launch(self, shape: StepShape, model: Decoder) -> Tensor:
        inputs = self._inputs[: shape.num_inputs]
        prompt_lengths = (shape.num_tokens,) if shape.is_prompt else None
        return compute_step(model, self.pool, self.tables, inputs, shape, prompt_lengths)


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Powers of two up to 8, then every 8 up to 64, every 16 up to 128, then every 32."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, max_num_seqs + 32, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def context_lengths(max_context: int) -> list[int]:
    """2,048 tokens and each four times the one before, up to `max_context`."""
    lengths = [_FIRST_CONTEXT]
    while lengths[-1] < max_context:
        lengths.append(lengths[-1] * _CONTEXT_FACTOR)
    return [*lengths[:-1], max_context]


def prefill_sizes(num_seqs: int) -> list[int]:
    """Numbers of tokens of captured prefill steps, always more than sequences: close to each other for
    one sequence, and few for a full batch."""
    if num_seqs == 1:
        return [*range(32, 256, 32), *range(256, _MAX_GRAPH_TOKENS + 1, 64)]
    return [size for size in (128, 256, 512, _MAX_GRAPH_TOKENS) if size > num_seqs]


def prompt_sizes() -> list[int]:
    """Numbers of tokens of captured steps that compute one whole prompt."""
    return [*prefill_sizes(1), *range(_MAX_GRAPH_TOKENS + _PROMPT_STEP, _MAX_GRAPH_PROMPT + 1, _PROMPT_STEP)]


def verify_sizes(num_seqs: int) -> list[int]:
    """Numbers of tokens of captured steps in which every token has logits: 4 and 8 for each sequence."""
    return [size for size in (4 * num_seqs, 8 * num_seqs) if size <= _MAX_VERIFY_TOKENS]


def all_shapes(batch_sizes: list[int], contexts: list[int]) -> Iterator[StepShape]:
    """What is captured for contexts of these numbers of blocks: decode steps of every batch size, steps
    that verify drafts, and prefill steps of one prompt, of one sequence that has begun, and of a full
    batch, which have some rows of logits to spare for drafts."""
    for num_blocks in contexts:
        for size in batch_sizes:
            yield StepShape(size, size, num_blocks)
            for num_tokens in verify_sizes(size):
                yield StepShape(num_tokens, size, num_blocks, num_drafts=num_tokens - size)
        for num_seqs in {batch_sizes[-1], 1}:
            for num_tokens in prefill_sizes(num_seqs):
                yield StepShape(num_tokens, num_seqs, num_blocks)
    first, *longer = contexts
    for num_tokens in prompt_sizes():
        for num_blocks in [first] if num_tokens <= _FIRST_CONTEXT else longer[:1]:
            yield StepShape(num_tokens, 1, num_blocks, is_prompt=True)


def uncaptured_shapes(contexts: list[int]) -> Iterator[StepShape]:
    """Steps that run without a graph, one for each set of kernels that such steps launch: Triton compiles
    a kernel anew where a number is a multiple of 16 and where it is not."""
    for num_blocks in {contexts[0], max(1, contexts[0] - 1)}:
        yield StepShape(_MAX_GRAPH_PROMPT + _PROMPT_ALIGNMENT, 1, num_blocks, is_prompt=True)
        for num_tokens in (_MAX_GRAPH_TOKENS + 1, _MAX_GRAPH_TOKENS + 16):
            yield StepShape(num_tokens, 2, num_blocks, is_prompt=True)
            for num_seqs in (1, 2):
                yield StepShape(num_tokens, num_seqs, num_blocks)


def most_inputs(batch_sizes: list[int], contexts: list[int]) -> int:
    """Length of the longest packed inputs of all steps that are launched at start."""
    shapes = [*all_shapes(batch_sizes, contexts), *uncaptured_shapes(contexts)]
    return max(shape.num_inputs for shape in shapes)


def aligned_prompt(shape: StepShape) -> StepShape:
    """A prompt that no graph holds, padded, so that few lengths are new to the library that attends."""
    if not shape.is_prompt or shape.num_seqs > 1:
        return shape
    return replace(shape, num_tokens=-(-shape.num_tokens // _PROMPT_ALIGNMENT) * _PROMPT_ALIGNMENT)


def fitting_shape(shape: StepShape, batch_sizes: list[int], contexts: list[int]) -> StepShape | None:
    """The smallest of `all_shapes` that holds this one, or None."""
    if shape.num_blocks > contexts[-1] or shape.num_seqs > batch_sizes[-1]:
        return None
    num_blocks = contexts[bisect_left(contexts, shape.num_blocks)]
    if shape.num_tokens == shape.num_seqs:
        size = batch_sizes[bisect_left(batch_sizes, shape.num_seqs)]
        return StepShape(size, size, num_blocks)
    if shape.num_drafts:
        return _fitting_verify_shape(shape, batch_sizes, num_blocks)
    num_seqs = 1 if shape.num_seqs == 1 else batch_sizes[-1]
    is_prompt = shape.is_prompt and num_seqs == 1
    captured = prompt_sizes() if is_prompt else prefill_sizes(num_seqs)
    num_tokens = next((size for size in captured if size >= shape.num_tokens), None)
    if num_tokens is None:
        return None
    # Layers with a window or sinks, and all in deterministic mode, read a prompt's block table, too.
    return StepShape(num_tokens, num_seqs, num_blocks, is_prompt)


def _fitting_verify_shape(shape: StepShape, batch_sizes: list[int], num_blocks: int) -> StepShape | None:
    """The captured shape with the fewest tokens that holds a step with drafts."""
    most = batch_sizes[-1]
    shapes = [StepShape(num_tokens, most, num_blocks) for num_tokens in prefill_sizes(most) if most > 1]
    for size in batch_sizes[bisect_left(batch_sizes, shape.num_seqs) :]:
        shapes += [StepShape(n, size, num_blocks, num_drafts=n - size) for n in verify_sizes(size)]
    fitting = [s for s in shapes if s.num_tokens >= shape.num_tokens and s.num_logits >= shape.num_logits]
    return min(fitting, default=None)
