"""The record of what has run on a GPU holds what tests and models say of themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from dayshift.engine.bench.model_watch import seen_model, watched_models
from dayshift.engine.models.convert import convert_model
from dayshift.engine.models.loader import load_decoder
from dayshift.engine.models.seen_on_gpu import SeenModel, SeenRun, read_runs
from tests.engine.test_decoder import logits_of, make_runner
from tests.seen_on_gpu import Recorder, new_run


@pytest.mark.parametrize(
    ("weight_type", "fields", "expected"),
    [
        ("Q4_1", {"tie_word_embeddings": False}, "Q4_1"),
        ("MXFP4", {"model_type": "gpt_oss"}, "MXFP4"),
        ("F32", {}, "float32"),
    ],
)
def test_a_model_is_named_by_what_its_layers_hold(
    weight_type: str,
    fields: dict[str, Any],
    expected: str,
    make_tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.gguf"
    convert_model(make_tiny_model(**fields), path, weight_type)
    model = load_decoder(
        path,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_positions=64,
        load_format="auto",
        seed=0,
        keep_quantized=True,
    )
    assert seen_model(model) == SeenModel(
        model_type=fields.get("model_type", "qwen3"), weights=expected, path="our decoder"
    )


def test_only_models_that_are_called_on_the_device_are_seen(tiny_model_dir: Path) -> None:
    runner = make_runner(tiny_model_dir)
    with watched_models() as on_gpu, watched_models("cpu") as on_cpu:
        assert on_cpu == set()
        logits_of(runner, [5, 6, 7], [3])
    assert on_cpu == {SeenModel(model_type="qwen3", weights="float32")}
    assert on_gpu == set()


def test_models_of_transformers_are_seen_as_the_fallbacks() -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = GPTNeoXForCausalLM(GPTNeoXConfig.from_dict({**sizes, "intermediate_size": 8}))
    with watched_models("cpu") as seen:
        model(torch.tensor([[1, 2]]))
    assert {(m.model_type, m.path) for m in seen} == {("gpt_neox", "`transformers` fallback")}


def report(nodeid: str, outcome: Any, *models: SeenModel) -> pytest.TestReport:
    """The report of a test that ran such models."""
    properties = [("models seen on a GPU", msgspec.to_builtins(models))]
    return pytest.TestReport(nodeid, ("x.py", 1, "x"), {}, outcome, None, "call", user_properties=properties)


def test_a_run_is_recorded_test_by_test(tmp_path: Path) -> None:
    path, root = tmp_path / "seen.json", Path(__file__).parents[2]
    command = "pytest -q -m gpu -p tests.seen_on_gpu --seen-on-gpu seen.json"
    recorder = Recorder(path, new_run(command, "H200", root))
    llama, gemma = (SeenModel(model_type=name, weights="bfloat16") for name in ("llama", "gemma3_text"))
    recorder.pytest_runtest_logreport(report("tests/x.py::test_a[1]", "passed", llama))
    recorder.pytest_runtest_logreport(report("tests/x.py::test_b[1]", "failed", gemma))
    recorder.pytest_runtest_logreport(report("tests/x.py::test_a[2]", "passed", llama))
    recorder.pytest_sessionfinish()
    (run,) = read_runs(path)
    assert run == SeenRun(
        command="pytest -q -m gpu",
        machine="H200",
        commit=run.commit,
        date=run.date,
        num_passed=2,
        failed=("tests/x.py::test_b[1]",),
        models=(msgspec.structs.replace(llama, seen_in=("tests/x.py::test_a",)),),
    )
    assert run.commit
