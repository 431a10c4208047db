"""Padded steps compute what exact steps do, and a graph's replay what its launches do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dayshift.engine.block_pool import BlockPool, Chunk, Context
from dayshift.engine.block_tables import BlockTables
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.models.loader import load_decoder
from dayshift.engine.step_graphs import (
    StepGraphs,
    StepInputs,
    StepShape,
    aligned_prompt,
    all_shapes,
    batch_sizes,
    compute_step,
    context_lengths,
    fitting_shape,
    uncaptured_shapes,
)

MAX_CONTEXT, NUM_SEQS = 256, 6


def make_runner(folder: Path, device: str, graph_context: int | None = None) -> ModelRunner:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = load_decoder(
        folder, dtype=dtype, device=torch.device(device), num_positions=512, load_format="auto", seed=0
    )
    pool = BlockPool(model.config, num_blocks=128, block_size=16, dtype=dtype, device=torch.device(device))
    return ModelRunner(
        model, pool, max_num_seqs=NUM_SEQS, max_context=MAX_CONTEXT, graph_context=graph_context
    )


@pytest.fixture(scope="module")
def runner(tiny_model_dir: Path) -> ModelRunner:
    return make_runner(tiny_model_dir, "cpu")


@pytest.fixture
def contexts(runner: ModelRunner) -> Iterator[list[Context]]:
    """Contexts of unlike lengths, computed but for their last tokens."""
    made = fill(runner, [3, 16, 47, 130, 200])
    yield made
    for context in made:
        runner.pool.release(context)


def fill(runner: ModelRunner, lengths: list[int]) -> list[Context]:
    generator = torch.Generator().manual_seed(3)
    made: list[Context] = []
    for length in lengths:
        token_ids = torch.randint(3, 500, (length + 40,), generator=generator).tolist()
        context = Context(token_ids)
        runner.pool.reserve(context, len(token_ids))
        runner.run([Chunk(context=context, num_tokens=length, needs_sampling=True)])
        made.append(context)
    return made


SMALL = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SMALL
@given(
    num_tokens=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    num_drafts=st.lists(st.integers(0, 7), min_size=5, max_size=5),
    num_more_drafts=st.integers(0, 9),
    num_more_tokens=st.integers(0, 30),
    num_more_seqs=st.integers(0, 3),
    num_more_blocks=st.integers(0, 3),
)
def test_padding_changes_nothing(
    runner: ModelRunner,
    contexts: list[Context],
    num_tokens: list[int],
    num_drafts: list[int],
    num_more_drafts: int,
    num_more_tokens: int,
    num_more_seqs: int,
    num_more_blocks: int,
):
    used = contexts[: len(num_tokens)]
    starts = [context.num_computed for context in used]
    query_start = [0]
    for count in num_tokens:
        query_start.append(query_start[-1] + count)
    longest = max(start + count for start, count in zip(starts, num_tokens, strict=True))
    num_drafts = [min(num, count - 1) for num, count in zip(num_drafts, num_tokens, strict=False)]
    num_blocks = runner.pool.num_blocks_for(longest)
    exact = StepShape(query_start[-1], len(used), num_blocks, num_drafts=sum(num_drafts))
    padded = StepShape(
        exact.num_tokens + num_more_tokens + num_more_seqs,
        exact.num_seqs + num_more_seqs,
        min(exact.num_blocks + num_more_blocks, MAX_CONTEXT // 16),
        num_drafts=exact.num_drafts + num_more_drafts,
    )
    inputs = StepInputs(
        token_ids=[
            token
            for context, start, count in zip(used, starts, num_tokens, strict=True)
            for token in context.token_ids[start : start + count]
        ],
        rows=runner.tables.rows(used),
        starts=starts,
        query_start=query_start,
        num_drafts=num_drafts,
    )
    others = [context for context in contexts if context not in used]
    before = [runner.pool.read(context, 0, context.num_computed) for context in others]
    results: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for shape in (exact, padded):
        packed = inputs.pack(shape, runner.tables.padding_row, pin_memory=False)
        logits = compute_step(runner.model, runner.pool, runner.tables, packed, shape)
        written = [
            runner.pool.read(context, start, start + count)
            for context, start, count in zip(used, starts, num_tokens, strict=True)
        ]
        results.append((logits[: exact.num_logits].clone(), written))
    (logits, kv), (padded_logits, padded_kv) = results
    torch.testing.assert_close(padded_logits, logits, rtol=1e-4, atol=1e-5)
    for exact_piece, padded_piece in zip(kv, padded_kv, strict=True):
        torch.testing.assert_close(padded_piece, exact_piece, rtol=1e-4, atol=1e-5)
    after = [runner.pool.read(context, 0, context.num_computed) for context in others]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


@SMALL
@given(length=st.integers(2, 60), num_more_tokens=st.integers(0, 40))
def test_a_prompt_computes_what_its_chunks_do(runner: ModelRunner, length: int, num_more_tokens: int):
    """Whole and by itself, padded behind its end, or in two chunks."""
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for way in ("whole", "padded", "chunks"):
        context = Context([3 + 7 * place % 400 for place in range(length)])
        runner.pool.reserve(context, length)
        if way == "padded":
            inputs = StepInputs(
                token_ids=context.token_ids,
                rows=runner.tables.rows([context]),
                starts=[0],
                query_start=[0, length],
                num_drafts=[0],
            )
            shape = StepShape(length + num_more_tokens, 1, MAX_CONTEXT // 16, is_prompt=True)
            packed = inputs.pack(shape, runner.tables.padding_row, pin_memory=False)
            lengths = inputs.prompt_lengths(shape.num_tokens)
            assert lengths == (shape.num_tokens,)
            logits = compute_step(runner.model, runner.pool, runner.tables, packed, shape, lengths)
        else:
            first = length if way == "whole" else 1
            logits = runner.run([Chunk(context=context, num_tokens=first, needs_sampling=True)])
            if first < length:
                chunk = Chunk(context=context, num_tokens=length - first, needs_sampling=True)
                logits = runner.run([chunk])
        results.append((logits.clone(), runner.pool.read(context, 0, length)))
        runner.pool.release(context)
    for logits, kv in results[1:]:
        torch.testing.assert_close(logits, results[0][0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kv, results[0][1], rtol=1e-4, atol=1e-5)


@given(
    num_seqs=st.integers(1, 200),
    tokens_per_seq=st.integers(1, 20) | st.integers(1000, 5000),
    num_blocks=st.integers(1, 3000),
    max_num_seqs=st.integers(1, 150),
    is_prompt=st.booleans(),
)
@example(num_seqs=1, tokens_per_seq=3000, num_blocks=1, max_num_seqs=4, is_prompt=True)
def test_a_fitting_shape_holds_the_step_and_is_one_of_those_captured(
    num_seqs: int, tokens_per_seq: int, num_blocks: int, max_num_seqs: int, is_prompt: bool
):
    sizes = batch_sizes(max_num_seqs)
    contexts = [length // 16 for length in context_lengths(32_768)]
    num_tokens = num_seqs * tokens_per_seq
    is_prompt = is_prompt and tokens_per_seq > 1
    if is_prompt:
        num_blocks = -(-tokens_per_seq // 16)
    shape = StepShape(num_tokens, num_seqs, num_blocks, is_prompt)
    fit = fitting_shape(shape, sizes, contexts)
    most = 4096 if is_prompt and num_seqs == 1 else 1024
    if num_seqs > max_num_seqs or num_blocks > 2048 or (tokens_per_seq > 1 and num_tokens > most):
        assert fit is None
        padding = aligned_prompt(shape).num_tokens - num_tokens
        assert padding in range(128 if is_prompt and num_seqs == 1 else 1)
        return
    assert fit is not None
    assert fit in set(all_shapes(sizes, contexts))
    assert fit.num_tokens >= shape.num_tokens
    assert fit.num_tokens < num_tokens + 64 or not fit.is_prompt
    assert fit.num_seqs >= num_seqs
    assert fit.num_blocks >= num_blocks  # of a prompt, too: not all layers attend to the step alone
    assert (fit.num_tokens == fit.num_seqs) == (tokens_per_seq == 1)
    assert fit.is_prompt == (is_prompt and num_seqs == 1)


@given(
    tokens_and_drafts=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 7)), min_size=1, max_size=140),
    max_num_seqs=st.integers(1, 150),
)
def test_a_shape_for_drafts_holds_their_tokens_and_logits(
    tokens_and_drafts: list[tuple[int, int]], max_num_seqs: int
):
    sizes, contexts = batch_sizes(max_num_seqs), [128, 512]
    num_seqs, num_drafts = len(tokens_and_drafts), sum(drafts for _, drafts in tokens_and_drafts)
    num_tokens = sum(tokens for tokens, _ in tokens_and_drafts) + num_drafts
    fit = fitting_shape(StepShape(num_tokens, num_seqs, 100, num_drafts=num_drafts), sizes, contexts)
    if fit is None:
        assert num_seqs > max_num_seqs or num_tokens > min(32, 8 * num_seqs) or num_seqs == 1
        return
    assert fit in set(all_shapes(sizes, contexts))
    assert fit.num_tokens >= num_tokens
    assert fit.num_seqs >= num_seqs
    assert fit.num_logits >= num_seqs + num_drafts


def test_rows_of_logits_are_those_of_the_drafts_one_by_one(runner: ModelRunner, contexts: list[Context]):
    """A chunk with drafts computes what chunks of one token do, and counts its own tokens only."""
    first, second = contexts[1], contexts[3]
    start = first.num_computed
    drafts = tuple(first.token_ids[start + 1 : start + 5])
    chunks = [
        Chunk(context=first, num_tokens=1, needs_sampling=True, draft_ids=drafts),
        Chunk(context=second, num_tokens=7, needs_sampling=False),
    ]
    logits = runner.run(chunks).clone()
    assert len(logits) == 5
    assert first.num_computed == start + 1
    assert second.num_computed == 130 + 7
    first.num_computed = start
    for row in logits:
        alone = runner.run([Chunk(context=first, num_tokens=1, needs_sampling=True)])
        torch.testing.assert_close(row, alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 60, 100, 128, 250])
def test_batch_sizes_rise_to_the_largest(max_num_seqs: int):
    sizes = batch_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs


@given(
    steps=st.lists(
        st.lists(
            st.tuples(st.integers(0, 9), st.lists(st.integers(0, 99), max_size=5)),
            min_size=1,
            max_size=3,
            unique_by=lambda used: used[0],
        ),
        max_size=12,
    )
)
def test_every_row_holds_its_context_table(steps: list[list[tuple[int, list[int]]]]):
    """Contexts come, go and change their blocks; three rows serve ten of them."""
    tables = BlockTables(num_rows=3, num_blocks=5, device=torch.device("cpu"))
    known = [Context() for _ in range(10)]
    for step in steps:
        for number, block_ids in step:
            known[number].block_table[:] = block_ids
        rows = tables.rows([known[number] for number, _ in step])
        assert len(set(rows)) == len(rows)
        for row, (_, block_ids) in zip(rows, step, strict=True):
            assert row != tables.padding_row
            assert tables.ids[row, : len(block_ids)].tolist() == block_ids
        assert not tables.ids[tables.padding_row].any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("num_between", [0, 1, 2])
def test_a_step_launched_ahead_keeps_its_logits(tiny_model_dir: Path, device: str, num_between: int):
    """Also if other steps run before they are taken, as when a session is parked meanwhile; and its tokens
    come from the device, whatever the host has."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    runner = make_runner(tiny_model_dir, device, MAX_CONTEXT if device == "cuda" else None)
    *contexts, other = fill(runner, [3, 20, 40])
    token_ids = torch.tensor([7, 8], device=device)
    launched = runner.run_ahead(contexts, token_ids)
    for _ in range(num_between):
        runner.run([Chunk(context=other, num_tokens=1, needs_sampling=True)])
    ahead = launched.take().clone()
    for context, token_id in zip(contexts, (7, 8), strict=True):
        context.token_ids[context.num_computed] = token_id
    chunks = [Chunk(context=context, num_tokens=1, needs_sampling=True) for context in contexts]
    assert torch.equal(runner.run(chunks), ahead)


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_a_replay_equals_its_launches(make_tiny_model: Callable[..., Path], model_type: str):
    """Prefill, mixed and decode steps of both runners, fed the same tokens, with and without drafts."""
    folder = make_tiny_model(model_type=model_type)
    plain, graphed = (make_runner(folder, "cuda", context) for context in (None, MAX_CONTEXT))
    lengths = [3, 16, 47, 130, 200]
    pairs = list(zip(fill(plain, lengths), fill(graphed, lengths), strict=True))
    for step, num_drafts in (
        ([1, 1, 1, 1, 1], 0),
        ([1, 9, 1], 0),
        ([1], 0),
        ([5], 0),
        ([1], 3),
        ([1, 1, 1], 7),
        ([1, 9], 2),
        ([1, 1], 0),
    ):
        results: list[torch.Tensor] = []
        for side, runner in enumerate((plain, graphed)):
            chunks = [
                Chunk(
                    context=pair[side],
                    num_tokens=count,
                    needs_sampling=True,
                    draft_ids=tuple(range(5, 5 + num_drafts)),
                )
                for pair, count in zip(pairs, step, strict=False)
            ]
            if runner is graphed:
                assert runner.graphs is not None
                longest = max(chunk.context.num_computed + chunk.num_queries for chunk in chunks)
                num_all_drafts = num_drafts * len(step)
                shape = StepShape(
                    sum(step) + num_all_drafts,
                    len(step),
                    runner.pool.num_blocks_for(longest),
                    num_drafts=num_all_drafts,
                )
                assert runner.graphs.shape_for(shape) is not None
            results.append(runner.run(chunks).clone())
        torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 6, 256])
def test_the_inputs_of_every_step_at_start_find_room(tiny_model_dir: Path, max_num_seqs: int):
    """However few sequences there are, and for the steps that run without a graph, too."""
    runner = make_runner(tiny_model_dir, "cpu")
    tables = BlockTables(num_rows=max_num_seqs, num_blocks=128, device=torch.device("cpu"))
    graphs = StepGraphs(runner.model, runner.pool, tables, max_context=MAX_CONTEXT)
    for shape in (*all_shapes(graphs.batch_sizes, graphs.contexts), *uncaptured_shapes(graphs.contexts)):
        inputs = graphs.put_padding(shape)
        assert len(inputs) == shape.num_inputs
        assert inputs[shape.num_tokens] == tables.padding_row


def test_what_runs_without_a_graph_is_compiled_as_well():
    """Every way that Triton tells the numbers of a step apart: a multiple of 16, or not."""
    contexts = [128, 512]
    found = list(uncaptured_shapes(contexts))
    assert all(fitting_shape(shape, batch_sizes(8), contexts) is None for shape in found)
    kinds = {(s.num_tokens % 16 == 0, s.num_blocks % 16 == 0, s.num_seqs, s.is_prompt) for s in found}
    assert len(kinds) == len(found) == 14
    assert all(aligned_prompt(shape) == shape for shape in found)
