"""The serving benchmarks count what a server sends, and give the same numbers for every target."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dayshift.engine import Engine
from dayshift.engine.bench.dummy_models import SHAPES, write_shape
from dayshift.engine.bench.serving import (
    Prompts,
    mean_generated,
    measure_beside,
    measure_decode,
    measure_ttft,
    percentile,
    step_ms,
)
from dayshift.engine.bench.targets import EngineTarget, HttpTarget, Load, Reply, Target
from dayshift.engine.config import EngineConfig
from dayshift.engine.models.formats import load_model_config
from dayshift.engine.server.run import ServerOptions, running_server
from dayshift.engine.tokenizer import Tokenizer
from dayshift.types import DayshiftError
from tests.engine.conftest import VOCAB_SIZE


@pytest.fixture(scope="module")
def config(tiny_model_dir: Path) -> EngineConfig:
    return EngineConfig(model=str(tiny_model_dir), num_kv_blocks=512, max_num_seqs=8)


@pytest.fixture(scope="module")
def http(config: EngineConfig) -> Iterator[HttpTarget]:
    with running_server(config, ServerOptions(port=0, model_name="tiny", in_process=True)) as url:
        yield HttpTarget(url, "tiny")


@pytest.fixture(params=["http", "engine"])
def target(request: pytest.FixtureRequest, config: EngineConfig) -> Iterator[Target]:
    if request.param == "http":
        yield request.getfixturevalue("http")
    else:
        engine = Engine(config)
        yield EngineTarget(engine)
        engine.close()


def test_every_token_is_counted(target: Target):
    prompts = Prompts(VOCAB_SIZE, seed=0)
    loads = [Load(prompt=prompts.make(20 + i), num_tokens=5 + i) for i in range(3)]
    for i, reply in enumerate(target.run(loads)):
        assert reply.marks[-1][1] == 5 + i
        seconds, counts = zip(*reply.marks, strict=True)
        assert list(seconds) == sorted(seconds)
        assert list(counts) == sorted(set(counts))
        assert reply.ttft_ms > 0


def test_cells_are_named_as_in_the_committed_results(target: Target):
    prompts = Prompts(VOCAB_SIZE, seed=1)
    ttft = list(measure_ttft(target, prompts, [10, 40], repeats=2))
    assert [row.cell for row in ttft] == ["10", "40"]
    assert all(len(row.all_ms) == 2 and min(row.all_ms) > 0 for row in ttft)
    decode = list(measure_decode(target, prompts, [(1, 10), (3, 20)], repeats=1, num_tokens=20))
    assert [row.cell for row in decode] == ["1@10", "3@20"]
    assert all(row.median_ms > 0 for row in decode)


def test_a_prompt_comes_in_while_others_decode(target: Target):
    measured = measure_beside(target, Prompts(VOCAB_SIZE, seed=2), num_decoders=2, prompt=600)
    assert measured.prompt_ttft_ms > 0
    assert measured.ratio == measured.beside_p99_ms / measured.alone_p99_ms > 0


def test_prompts_never_repeat():
    prompts = Prompts(VOCAB_SIZE, seed=3)
    first, second = prompts.make(50), prompts.make(50)
    assert first != second
    assert Prompts(VOCAB_SIZE, seed=3).make(50) == first
    assert all(0 <= token_id < VOCAB_SIZE for token_id in first + second)


def test_a_step_is_counted_while_all_decode():
    """Two replies of one token every 10 ms, the second one second later and in parts of two."""
    early = Reply(0.0, [(0.01 * i, i) for i in range(1, 301)])
    late = Reply(0.0, [(1.0 + 0.02 * i, 2 * i) for i in range(1, 101)])
    assert step_ms([early, late]) == pytest.approx(10.0, rel=0.02)


def test_what_was_generated_is_counted_while_all_decode():
    """The early one has 102 to 200 tokens while both decode, the late one 2 to 100."""
    early = Reply(0.0, [(0.01 * i, i) for i in range(1, 201)])
    late = Reply(0.0, [(1.0 + 0.02 * i, 2 * i) for i in range(1, 101)])
    assert mean_generated([early, late]) == pytest.approx(101)


def test_sequences_have_the_context_of_their_cell_in_the_mean(target: Target):
    """Also where the first of them generates much before the last has begun."""
    sizes: list[int] = []
    grown: list[float] = []

    class Watched:
        def run(self, loads: Sequence[Load]) -> list[Reply]:
            replies = target.run(loads)
            sizes.append(len(loads[0].prompt))
            grown.append(mean_generated(replies))
            return replies

    list(measure_decode(Watched(), Prompts(VOCAB_SIZE, seed=0), [(3, 100)], repeats=1, num_tokens=40))
    assert sizes[0] == 100
    assert sizes[1] == 100 - round(grown[0]) < 100


def test_percentile():
    assert percentile(range(1, 101), 99) == 99
    assert percentile([3.0], 99) == 3.0
    assert percentile([5, 1], 50) == 1


def test_a_refusal_is_one_line(http: HttpTarget):
    with pytest.raises(DayshiftError, match="answered 404") as caught:
        HttpTarget(http.url, "another").run([Load(prompt=[5], num_tokens=1)])
    assert "\n" not in str(caught.value)


def test_a_server_that_is_not_there_is_one_line():
    with pytest.raises(DayshiftError, match=r"^http://127\.0\.0\.1:1: .*[Rr]efused"):
        HttpTarget("http://127.0.0.1:1", "m").run([Load(prompt=[5], num_tokens=1)])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "the connection ended before the reply did"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "the connection ended before the reply did"),
        (b"+PONG\r\n", "does not answer in HTTP"),
    ],
)
def test_a_server_that_breaks_off_is_one_line(answer: bytes, message: str):
    def answer_one() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        answering = thread.submit(answer_one)
        with pytest.raises(DayshiftError, match=message):
            HttpTarget(f"http://127.0.0.1:{listener.getsockname()[1]}", "m").run(
                [Load(prompt=[5], num_tokens=1)]
            )
        answering.result()


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_folders_that_load(name: str, tmp_path: Path):
    folder = write_shape(name, tmp_path / name)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert load_model_config(folder).vocab_size == vocab_size
    assert Tokenizer(folder).decode([0, 5, vocab_size - 1]).endswith(f"<{vocab_size - 1}>")


def test_an_unknown_shape_names_the_known():
    with pytest.raises(DayshiftError, match=r"shape gpt-9 is unknown; allowed: llama-3\.1-8b"):
        write_shape("gpt-9", Path("unused"))
