"""Decodes in equal shares: wherever a sequence is cut, its output is its twin's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dayshift.engine.kernels import attention, decode_attention, reference
from tests.engine.test_kernels_triton import assert_close, attention_case, randn
from tests.engine.test_kernels_triton import interpreter as interpreter
from tests.engine.test_kernels_triton import launch as launch

Launch = Callable[..., Any]

# Lengths of sequences with one query, in tiles of 32 keys and blocks of 16.
MANY = [1, 16, 17, 32, 33, 300, 0, 64, 257, 5, 0]
PADDED = [0, 0, 40, 0]


def attend_on(num_processors: int, *arguments: Any) -> torch.Tensor:
    """`paged_attention` as a GPU with so many processors would share it out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_attention, "num_processors", lambda device: num_processors)
        return attention.paged_attention(*arguments)


def decodes(lens: list[int]) -> list[tuple[int, int]]:
    return [(seq_len, 1) for seq_len in lens]


@pytest.mark.parametrize(
    ("lens", "num_processors"),
    [
        pytest.param(MANY, 1, id="many in one share"),
        pytest.param(MANY, 2, id="many in some shares"),
        pytest.param(MANY, 100, id="most cut nowhere"),
        pytest.param([300, 420], 2, id="both cut once"),
        pytest.param([1100], 1, id="one in one share"),
        pytest.param([2500], 100, id="more pieces than one turn adds up"),
        pytest.param([256, 512, 256], 4, id="cut where they meet"),
        pytest.param(PADDED, 4, id="padding around it"),
        pytest.param([0, 0], 4, id="nothing but padding"),
        pytest.param([32] * 70, 3, id="more than the least number read in one go"),
    ],
)
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        ((4, 2, 16), torch.float16),
        ((5, 1, 10), torch.float32),
        pytest.param((32, 8, 128), torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param((32, 4, 128), torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_decodes_equal_their_twin(
    launch: Launch,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    lens: list[int],
    num_processors: int,
    request: pytest.FixtureRequest,
):
    if dtype == torch.bfloat16 and "interpreter" in request.node.name:
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly")
    arguments = attention_case(heads, decodes(lens), dtype=dtype)
    expected = reference.paged_attention(*arguments)
    assert_close(launch(attend_on, num_processors, *arguments), expected)


@pytest.mark.parametrize("window", [1, 40, 300])
@pytest.mark.parametrize("num_processors", [1, 3])
def test_a_sink_counts_once_however_a_window_is_cut(launch: Launch, window: int, num_processors: int):
    sinks = randn(4, dtype=torch.float32, seed=5) * 3
    case = attention_case((4, 2, 16), decodes([700, 1, 0, 290, 64]), dtype=torch.float16)
    arguments: list[Any] = [*case, sinks.half(), window]
    assert_close(launch(attend_on, num_processors, *arguments), reference.paged_attention(*arguments))


def test_chunks_of_the_same_step_take_no_part(launch: Launch):
    arguments = attention_case((4, 2, 16), [(300, 1), (90, 60), (40, 1), (3, 0), (300, 2)])
    assert_close(launch(attend_on, 3, *arguments), reference.paged_attention(*arguments))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lens=st.lists(st.integers(0, 400), min_size=1, max_size=6),
    num_processors=st.integers(1, 6),
    window=st.one_of(st.none(), st.integers(1, 400)),
)
def test_any_lengths_on_any_gpu(launch: Launch, lens: list[int], num_processors: int, window: int | None):
    case = attention_case((2, 1, 16), decodes(lens), dtype=torch.float16)
    arguments: list[Any] = [*case, None, window]
    assert_close(launch(attend_on, num_processors, *arguments), reference.paged_attention(*arguments))
