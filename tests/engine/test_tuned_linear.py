"""Products of prompts by tiles that were timed: the table, and on a GPU the bits of what they give."""

import json
import logging
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from dayshift.engine.bench.kernels import SHAPES
from dayshift.engine.bench.products import (
    SIZES,
    ProductRow,
    _finalists,
    as_tables,
    candidates,
    tune,
    weights_of,
)
from dayshift.engine.kernels import cublas_lt, few_token_linear, reference, tuned_linear
from dayshift.engine.kernels.cublas_lt import Algorithm
from dayshift.engine.kernels.tuned_linear import (
    LEAST_TOKENS,
    TABLE,
    Tables,
    Tuned,
    entry_for,
    read_tables,
    write_tables,
)
from dayshift.engine.step_graphs import prompt_sizes
from dayshift.types import DayshiftError

algorithms = st.none() | st.builds(Algorithm, *[st.integers(0, 2**16 - 1)] * 5)
num_tokens_of_entries = st.lists(st.integers(LEAST_TOKENS, 100_000), min_size=1, max_size=6, unique=True).map(
    sorted
)


@st.composite
def tables(draw: st.DrawFn) -> Tables:
    weights = draw(st.lists(st.tuples(st.integers(1, 2**17), st.integers(1, 2**17)), max_size=3, unique=True))
    return {
        weight: tuple(Tuned(n, draw(algorithms)) for n in draw(num_tokens_of_entries)) for weight in weights
    }


@given(first=tables(), second=tables(), again=tables())
def test_a_file_has_a_table_for_each_gpu(
    tmp_path_factory: pytest.TempPathFactory, first: Tables, second: Tables, again: Tables
):
    path = tmp_path_factory.mktemp("tuned") / "tables.json"
    write_tables(path, "GPU", 130100, first)
    write_tables(path, "GPU", 140000, second)
    assert read_tables(path, "GPU", 130100) == first
    write_tables(path, "GPU", 130100, again)
    assert read_tables(path, "GPU", 130100) == again
    assert read_tables(path, "GPU", 140000) == second
    assert read_tables(path, "another GPU", 130100) == {}


@given(sizes=num_tokens_of_entries, num_tokens=st.integers(1, 200_000))
def test_an_entry_is_for_at_most_its_tokens(sizes: list[int], num_tokens: int):
    entries = tuple(Tuned(size, Algorithm(size, 0, 0, 0, 0)) for size in sizes)
    index = entry_for(entries, num_tokens)
    if num_tokens < LEAST_TOKENS:
        assert index is None
    else:
        assert index is not None
        assert num_tokens <= sizes[index] or index == len(sizes) - 1
        assert index == 0 or sizes[index - 1] < num_tokens


@pytest.mark.parametrize(
    "text", ["", "{}x", "[1]", '[{"device": "GPU"}]', '[{"device": "GPU", "cublaslt": 1}]']
)
def test_a_file_that_is_no_table_is_one_line(text: str, tmp_path: Path):
    path = tmp_path / "tables.json"
    path.write_text(text)
    with pytest.raises(DayshiftError, match=r"tables\.json is no file of --tune-products"):
        read_tables(path, "GPU", 1)


def test_a_place_that_cannot_be_written_is_one_line_and_leaves_what_there_is(tmp_path: Path):
    with pytest.raises(DayshiftError, match=r"none/tables\.json: No such file or directory"):
        write_tables(tmp_path / "none" / "tables.json", "GPU", 1, {})


def test_a_product_that_the_library_suggests_nothing_for_is_left_to_cublas():
    """It may have no algorithm without a workspace."""
    row = ProductRow(num_rows=8, size=4, num_tokens=128, cublas_us=9.0, tuned_us=9.0, algorithm=None)
    assert as_tables([row]) == {(8, 4): (Tuned(128, None),)}
    product = MagicMock(suggested=lambda num_tokens: {})
    assert _finalists(product, [torch.zeros(8, 4)], torch.zeros(3, 4), torch.zeros(3, 8), 0) == {}


def test_a_weight_that_no_table_has():
    assert entry_for((), 5000) is None


def test_the_table_has_what_the_benchmarks_shapes_need():
    """Every size of a captured prompt has an entry of its own, so that none takes another's tile."""
    (made,) = json.loads(TABLE.read_text())
    assert made["device"] == "NVIDIA H200"
    found = read_tables(TABLE, made["device"], made["cublaslt"])
    assert set(found) == {weight for shape in SHAPES.values() for weight in weights_of(shape)}
    for entries in found.values():
        sizes = [entry.num_tokens for entry in entries]
        assert sizes == sorted(SIZES)
        assert {size for size in prompt_sizes() if size >= LEAST_TOKENS} <= set(sizes)


def test_a_tile_that_is_no_faster_is_left_to_cublas():
    tile = Algorithm(tile=423, stages=35, cluster=3, swizzle=1, custom=7)
    rows = [
        ProductRow(num_rows=8, size=4, num_tokens=n, cublas_us=100.0, tuned_us=tuned_us, algorithm=tile)
        for n, tuned_us in [(2432, 94.0), (2368, 99.6), (4096, 101.0)]
    ]
    assert as_tables(rows) == {(8, 4): (Tuned(2368, None), Tuned(2432, tile), Tuned(4096, None))}


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(4096, 2432), (28_672, 8960), (64, 1152)])
def test_candidates_differ(num_rows: int, num_tokens: int):
    found = candidates(num_rows, num_tokens, 132)
    assert len(set(found)) == len(found)


def test_tiles_that_fill_the_processors_are_tried():
    """2,432 tokens and 4,096 rows are 256 tiles of 128 x 304: two for nearly each of 132 processors."""
    assert 423 in {algorithm.tile for algorithm in candidates(4096, 2432, 132)}


def test_without_a_gpu_it_is_torchs():
    x, weight, bias = torch.randn(LEAST_TOKENS, 24), torch.randn(40, 24), torch.randn(40)
    assert torch.equal(tuned_linear.linear(x, weight), F.linear(x, weight))
    assert torch.equal(tuned_linear.linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.fixture
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: Tables) -> None:
    """Let a table take the place of the product's."""
    path = tmp_path / "tables.json"
    write_tables(path, torch.cuda.get_device_name(), cublas_lt.version(), made)
    monkeypatch.setattr(tuned_linear, "TABLE", path)
    for function in (tuned_linear._tables, tuned_linear._configured, tuned_linear._say_refused):
        function.cache_clear()


@pytest.fixture
def own_tables():
    """What a test has put in the place of the product's table is forgotten behind it."""
    yield
    for function in (tuned_linear._tables, tuned_linear._configured, tuned_linear._say_refused):
        function.cache_clear()


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("num_tokens", [640, 1024, 2340, 2432, 8960])
@pytest.mark.parametrize("weight_shape", [(6144, 4096), (4096, 4096), (5120, 2048), (2048, 4096)])
def test_the_bits_are_cublas_s(num_tokens: int, weight_shape: tuple[int, int]):
    x, weight = randn(num_tokens, weight_shape[1]), randn(*weight_shape)
    assert torch.equal(tuned_linear.linear(x, weight), F.linear(x, weight))


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_gated_behind_a_norm():
    x, residual, norm_weight, gate_up = randn(1300, 512), randn(1300, 512), randn(512), randn(1024, 512) / 20
    args = (x, residual, norm_weight, 1e-5, gate_up)
    for actual, expected in zip(
        few_token_linear.norm_gated_linear(*args), reference.norm_gated_linear(*args), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda", "own_tables")
def test_what_was_timed_is_taken_in_a_graph_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (row,) = tune([(512, 256)], [1152])
    use(monkeypatch, tmp_path, {(512, 256): (Tuned(row.num_tokens, row.algorithm),)})
    x, weight = randn(1100, 256), randn(512, 256)
    tuned_linear.linear(x, weight)
    runs: list[int] = []
    run = cublas_lt.Product.run
    monkeypatch.setattr(
        cublas_lt.Product, "run", lambda self, one, x, *rest: runs.append(len(x)) or run(self, one, x, *rest)
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tuned_linear.linear(x, weight)
    assert runs == [1100]
    x.copy_(randn(1100, 256))
    graph.replay()
    assert torch.equal(y, F.linear(x, weight))


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda", "own_tables")
def test_a_tile_that_is_refused_leaves_it_to_cublas(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    unknown = Algorithm(tile=60_000, stages=35, cluster=3, swizzle=0, custom=0)
    use(monkeypatch, tmp_path, {(512, 256): (Tuned(1152, unknown),)})
    x, weight = randn(1100, 256), randn(512, 256)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(tuned_linear.linear(x, weight), F.linear(x, weight))
    assert len(caplog.records) == 1
    assert "512 x 256" in caplog.text
