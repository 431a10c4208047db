"""Torch twin of `place_step`: where the tokens of a step stand, from the numbers that a step brings."""

from __future__ import annotations

from typing import NamedTuple

import torch


class StepPlacement(NamedTuple):
    """What the layers of a step ask for, on the device."""

    positions: torch.Tensor  # (num_tokens,) int32
    slot_mapping: torch.Tensor  # (num_tokens,) int64, -1 for padding
    block_tables: torch.Tensor  # (num_seqs, num_blocks) int32
    seq_lens: torch.Tensor  # (num_seqs,) int32, 0 for padding
    query_start: torch.Tensor  # (num_seqs + 1,) int32


def place_step(
    rows: torch.Tensor,
    starts: torch.Tensor,
    query_start: torch.Tensor,
    tables: torch.Tensor,
    num_tokens: int,
    num_blocks: int,
    block_size: int,
) -> StepPlacement:
    """Positions, KV slots, block tables and lengths of a step.

    Sequence i brings the tokens query_start[i] .. query_start[i + 1], the first of them at position
    starts[i] of its context. Tokens behind query_start[-1] are padding, and so are sequences without any.

    Args:
        rows: (num_seqs,) int64, each sequence's row of the tables.
        starts: (num_seqs,) int64.
        query_start: (num_seqs + 1,) int64, beginning with 0, at most num_tokens.
        tables: (num_rows, max_blocks) int32, rows contiguous.
        num_tokens: of the step, padding included.
        num_blocks: block ids that the longest context needs, at most max_blocks.
        block_size: tokens of a block.
    """
    num_seqs = len(rows)
    block_tables = tables[:, :num_blocks].index_select(0, rows)
    place = torch.arange(num_tokens, device=rows.device)
    is_token = place < query_start[-1]
    # A padding token stands, for its arithmetic, at position 0 of the last sequence.
    sequence = torch.searchsorted(query_start, place, right=True).sub_(1).clamp_(max=num_seqs - 1)
    positions = torch.where(is_token, place - query_start[sequence] + starts[sequence], 0)
    block_ids = block_tables[sequence, positions // block_size].long()
    slots = block_ids * block_size + positions % block_size
    num_queries = query_start.diff()
    return StepPlacement(
        positions=positions.int(),
        slot_mapping=torch.where(is_token, slots, -1),
        block_tables=block_tables,
        seq_lens=torch.where(num_queries > 0, starts + num_queries, 0).int(),
        query_start=query_start.int(),
    )
