"""`dayshift models`: the models that are here, and what one of them takes."""

from __future__ import annotations

import json
import shutil

import pytest

from dayshift.experiments.planners import default_model_folder


@pytest.fixture(autouse=True)
def hub_cache(monkeypatch, tmp_path):
    """An empty cache of the hub's models; its folder."""
    folder = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    return folder


def test_ls_finds_models_and_says_what_cannot_be_loaded(dayshift, hub_cache, tmp_path):
    shutil.copytree(default_model_folder(), tmp_path / "mine" / "planner")
    (tmp_path / "mine" / "other").mkdir()
    (tmp_path / "mine" / "other" / "config.json").write_text('{"model_type": "mamba"}')
    (tmp_path / "mine" / "damaged.gguf").write_bytes(b"GGUF")
    shutil.copytree(default_model_folder(), hub_cache / "models--org--tiny" / "snapshots" / ("a" * 40))

    ended = dayshift("models", "ls", "mine", "--json")
    assert ended.returncode == 0, ended.stderr
    models = {model.pop("model"): model for model in json.loads(ended.stdout)["models"]}
    assert list(models) == ["default", "org/tiny", "mine/damaged.gguf", "mine/other", "mine/planner"]
    assert models["default"] == models["org/tiny"] == models["mine/planner"]
    assert models["default"]["can_load"]
    assert models["default"]["model_type"] == "qwen3"
    assert "not a readable GGUF file" in models["mine/damaged.gguf"]["reason"]
    assert "mine/other has no .safetensors file" in models["mine/other"]["reason"]
    assert not models["default"]["is_fallback"]

    table = dayshift("models", "ls", "mine").stdout
    assert "org/tiny" in table
    assert "cannot be loaded" in table


def test_inspect_says_what_a_model_takes(dayshift):
    ended = dayshift("models", "inspect", "default", "--window", "1000", "--json")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    config, memory = report["config"], report["memory"]["bfloat16"]
    per_token = 2 * 2 * config["num_layers"] * config["num_kv_heads"] * config["head_dim"]
    assert memory["kv_bytes_per_token"] == per_token
    assert memory["kv_bytes_per_window"] == 1000 * per_token
    assert memory["weights_bytes"] == 2 * report["num_parameters"]
    assert report["session_refusal"] is None
    assert "a window of 1000" in " ".join(
        dayshift("models", "inspect", "default", "--window", "1000").stdout.split()
    )


def test_inspect_says_a_mistake_in_one_line(dayshift):
    ended = dayshift("models", "inspect", "./none")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(
        "dayshift: model folder ./none does not exist; give a folder, a .gguf file"
    )
    assert ended.stderr.count("\n") == 1
