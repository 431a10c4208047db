"""Triton kernel of `place_step`; `reference_placement.place_step` specifies it."""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels.launch import let_next_begin, overlap_options, padded, wait_for_previous
from dayshift.engine.kernels.reference_placement import StepPlacement

_TOKENS = 64  # of a program
_BLOCKS = 256  # of a block table, copied in one turn


def place_step(
    rows: torch.Tensor,
    starts: torch.Tensor,
    query_start: torch.Tensor,
    tables: torch.Tensor,
    num_tokens: int,
    num_blocks: int,
    block_size: int,
) -> StepPlacement:
    """Positions, KV slots, block tables and lengths of a step, in one launch instead of twenty.

    Shapes and dtypes as in `reference_placement.place_step`.
    """
    num_seqs, device = len(rows), rows.device
    placement = StepPlacement(
        positions=torch.empty(num_tokens, dtype=torch.int32, device=device),
        slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=device),
        block_tables=torch.empty((num_seqs, num_blocks), dtype=torch.int32, device=device),
        seq_lens=torch.empty(num_seqs, dtype=torch.int32, device=device),
        query_start=torch.empty(num_seqs + 1, dtype=torch.int32, device=device),
    )
    num_token_programs = triton.cdiv(num_tokens, _TOKENS)
    _place_step[(num_token_programs + num_seqs,)](
        rows,
        starts,
        query_start,
        tables,
        *placement,
        num_tokens,
        num_seqs,
        num_blocks,
        tables.stride(0),
        num_token_programs,
        BLOCK_SIZE=block_size,
        SEQS=padded(num_seqs),
        TOKENS=_TOKENS,
        BLOCKS=_BLOCKS,
        **overlap_options(device),
    )
    return placement


@triton.jit
def _place_step(
    rows_ptr,
    starts_ptr,
    query_start_ptr,
    tables_ptr,
    positions_ptr,
    slots_ptr,
    block_tables_ptr,
    lens_ptr,
    narrow_query_start_ptr,
    num_tokens,
    num_seqs,
    num_blocks,
    table_stride,
    num_token_programs,
    BLOCK_SIZE: tl.constexpr,
    SEQS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The first programs place TOKENS tokens each, every other one fills the rows of a sequence."""
    let_next_begin(OVERLAPS)
    wait_for_previous(OVERLAPS)
    program = tl.program_id(0)
    if program < num_token_programs:
        token = program * TOKENS + tl.arange(0, TOKENS)
        seq = tl.arange(0, SEQS)
        ends = tl.load(query_start_ptr + 1 + seq, mask=seq < num_seqs, other=num_tokens + TOKENS)
        is_over = ends[None, :] <= token[:, None]
        # A padding token stands, for its arithmetic, at position 0 of the last sequence.
        sequence = tl.minimum(tl.sum(is_over.to(tl.int32), axis=1), num_seqs - 1)
        is_token = token < tl.load(query_start_ptr + num_seqs)
        start = tl.load(starts_ptr + sequence)
        position = tl.where(is_token, token - tl.load(query_start_ptr + sequence) + start, 0)
        table = tables_ptr + tl.load(rows_ptr + sequence) * table_stride
        block_id = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        slot = tl.where(is_token, block_id * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(positions_ptr + token, position.to(tl.int32), mask=token < num_tokens)
        tl.store(slots_ptr + token, slot, mask=token < num_tokens)
    else:  # other names than above: the compiler gives a name one type in both branches
        row = program - num_token_programs
        first, end = tl.load(query_start_ptr + row), tl.load(query_start_ptr + row + 1)
        length = tl.where(end > first, tl.load(starts_ptr + row) + end - first, 0)
        tl.store(lens_ptr + row, length.to(tl.int32))
        tl.store(narrow_query_start_ptr + row, first.to(tl.int32))
        tl.store(narrow_query_start_ptr + row + 1, end.to(tl.int32))  # the next program writes the same
        row_table = tables_ptr + tl.load(rows_ptr + row) * table_stride
        for first_block in range(0, num_blocks, BLOCKS):
            block = first_block + tl.arange(0, BLOCKS)
            block_ids = tl.load(row_table + block, mask=block < num_blocks)
            tl.store(block_tables_ptr + row * num_blocks + block, block_ids, mask=block < num_blocks)
