"""Where the tokens of a step stand: the twin against plain arithmetic, the kernel against the twin."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dayshift.engine.kernels import reference_placement, step_placement
from dayshift.engine.kernels.reference_placement import StepPlacement
from tests.engine.test_kernels_triton import Launch
from tests.engine.test_kernels_triton import interpreter as interpreter
from tests.engine.test_kernels_triton import launch as launch

BLOCK_SIZE = 16


def step(
    lengths: list[int], num_computed: list[int], num_padding: int, num_tokens: int, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """Arguments of `place_step`: sequences of `lengths` new tokens, and `num_padding` without any."""
    num_seqs = len(lengths) + num_padding
    generator = torch.Generator().manual_seed(5)
    tables = torch.randint(0, 1000, (num_seqs + 3, num_blocks + 2), generator=generator, dtype=torch.int32)
    rows = torch.randperm(num_seqs + 3, generator=generator)[:num_seqs]
    starts = torch.tensor(num_computed + [0] * num_padding)
    query_start = torch.tensor([0, *lengths, *[0] * num_padding]).cumsum(0)
    return rows, starts, query_start, tables, num_tokens, num_blocks, BLOCK_SIZE


@given(
    contexts=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=5),
    num_padding_tokens=st.integers(0, 50),
    num_padding_seqs=st.integers(0, 3),
)
def test_every_token_has_its_place(
    contexts: list[tuple[int, int]], num_padding_tokens: int, num_padding_seqs: int
):
    lengths, computed = [length for length, _ in contexts], [start for _, start in contexts]
    args = step(lengths, computed, num_padding_seqs, sum(lengths) + num_padding_tokens, 15)
    rows, _, query_start, tables, *_ = args
    placed = reference_placement.place_step(*args)
    expected = [
        (start + index, int(tables[row, (start + index) // BLOCK_SIZE]) * 16 + (start + index) % 16)
        for row, length, start in zip(rows.tolist(), lengths, computed, strict=False)
        for index in range(length)
    ]
    num_real = len(expected)
    assert (
        list(zip(placed.positions.tolist(), placed.slot_mapping.tolist(), strict=True))
        == expected + [(0, -1)] * num_padding_tokens
    )
    ends = [start + length for start, length in zip(computed, lengths, strict=True)]
    assert placed.seq_lens.tolist() == ends + [0] * num_padding_seqs
    assert placed.query_start.tolist() == query_start.tolist()
    assert query_start[-1] == num_real
    assert torch.equal(placed.block_tables, tables[rows][:, :15])


def test_the_kernel_places_as_the_twin(launch: Launch):
    cases = [
        step([1], [0], 0, 1, 1),
        step([1] * 7, [3, 99, 0, 16, 15, 31, 800], 1, 8, 300),
        step([70, 1, 40], [0, 17, 160], 5, 256, 15),
    ]
    for args in cases:
        placed = StepPlacement(*launch(step_placement.place_step, *args))
        for actual, expected in zip(placed, reference_placement.place_step(*args), strict=True):
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)
