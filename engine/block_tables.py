"""The block tables of the running contexts, mirrored on the device.

A context's table changes when it is admitted or compacted, not while it decodes, so a step sends a
row number for each sequence instead of hundreds of block ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from dayshift.engine.block_pool import Context


class BlockTables:
    """A row of block ids for each of the `num_rows` contexts used last. Row `num_rows` stays zero: it is
    what padding reads."""

    def __init__(self, *, num_rows: int, num_blocks: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.ids = torch.zeros((num_rows + 1, num_blocks), dtype=torch.int32, device=device)
        self.on_change: Callable[[int, list[int]], None] = lambda row, block_ids: None
        """Is told of each row that gets other block ids."""
        self._rows: OrderedDict[Context, tuple[int, list[int]]] = OrderedDict()  # oldest use first

    @property
    def padding_row(self) -> int:
        return self.num_rows

    def rows(self, contexts: Seq[Context]) -> list[int]:
        """The rows of a step's contexts, distinct and at most `num_rows`, brought up to date."""
        for context in contexts:
            if context in self._rows:
                self._rows.move_to_end(context)
        return [self._row(context) for context in contexts]

    def _row(self, context: Context) -> int:
        row, sent = self._rows.get(context, (None, None))
        if row is None:
            row = len(self._rows)
            if row == self.num_rows:
                _, (row, _) = self._rows.popitem(last=False)
        if sent != context.block_table:
            block_ids = list(context.block_table)
            self.put(row, block_ids)
            self.on_change(row, block_ids)
            self._rows[context] = (row, block_ids)
        return row

    def put(self, row: int, block_ids: list[int]) -> None:
        """Give a row these ids on the device."""
        # Pinned, so that the copy waits for nothing: a row that a running step still reads is
        # overwritten after it, in the stream's order.
        ids = torch.tensor(block_ids, dtype=torch.int32, pin_memory=self.ids.is_cuda)
        self.ids[row, : len(ids)].copy_(ids, non_blocking=True)
