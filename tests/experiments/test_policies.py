"""The policy of a YAML file, and of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dayshift.experiments.config import PolicyConfig
from dayshift.experiments.engines import Engines
from dayshift.experiments.loading import load_arms
from dayshift.experiments.policies import SERVED_NAME, policy_sources, served_policies
from dayshift.experiments.yaml_tree import ConfigError
from dayshift.policy.smolvla.dummy import write_dummy_checkpoint
from dayshift.types import DayshiftError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_dummy_checkpoint(folder, "small")
    return folder


def policy_of(tmp_path: Path, text: str) -> PolicyConfig:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    return load_arms(file)[0].experiment.policy


def test_a_word_is_short_for_the_kind(tmp_path: Path) -> None:
    assert policy_of(tmp_path, "policy: scripted_expert") == PolicyConfig()


def test_weights_of_any_folder(tmp_path: Path, checkpoint: Path) -> None:
    policy = policy_of(tmp_path, f"policy: {{kind: smolvla, weights: {checkpoint}, n_action_steps: 5}}")
    assert (policy.weights, policy.n_action_steps, policy.pace) == (str(checkpoint), 5, "wait")
    saved = policy.model_dump(mode="json", exclude_none=True)
    assert "url" not in saved
    assert PolicyConfig.model_validate(saved) == policy
    assert PolicyConfig().model_dump(mode="json") == {"kind": "scripted_expert"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy: oracle", "scripted_expert"),
        ("policy: {kind: smolvla, weights: /nowhere}", "no SmolVLA checkpoint at /nowhere"),
        ("policy: {n_action_steps: 5}", "n_action_steps cannot be set for the scripted expert"),
        ("policy: {kind: smolvla, url: 'http://x', weights: a/b}", "weights cannot be set beside url"),
        ("policy: {kind: smolvla, url: 'http://x', sharing: streams}", "sharing cannot be set beside url"),
        ("policy: {kind: smolvla, sharing: processes}", "slices.*streams"),
        ("engine: {url: 'http://x'}\npolicy: smolvla", "policy.url"),
        ("policy: {kind: smolvla, url: 'http://x', blending: mix}", "rtc"),
    ],
)
def test_mistakes_say_where_and_what(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        policy_of(tmp_path, text)
    assert "policy" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_how_a_policy_shares_the_gpu_reaches_the_engine(tmp_path: Path, checkpoint: Path) -> None:
    policy = policy_of(tmp_path, f"policy: {{kind: smolvla, weights: {checkpoint}, sharing: streams}}")
    assert policy.model_dump(mode="json")["sharing"] == "streams"
    (source,) = served_policies(policy, device="cpu")
    with pytest.raises(DayshiftError, match="streams needs a CUDA device; on cpu, slices is allowed"):
        source.load(SERVED_NAME)
    assert source == policy_sources([f"policy={checkpoint}"], device="cpu", sharing="streams")[0]
    assert source != policy_sources([f"policy={checkpoint}"], device="cpu")[0]


def test_the_command_line_names_policies(checkpoint: Path) -> None:
    (source,) = policy_sources([f"arm={checkpoint}"], device="cpu")
    assert source.name == "arm"
    assert source == policy_sources([f"arm={checkpoint}"], device="cpu")[0]
    for wrong in (["arm"], ["=x"], [f"a b={checkpoint}"], [f"arm={checkpoint}"] * 2):
        with pytest.raises(ConfigError, match="--policy"):
            policy_sources(wrong, device="cpu")
    with pytest.raises(DayshiftError, match="does not exist"):
        policy_sources(["arm=/nowhere"], device="cpu")


def test_a_runs_engine_serves_its_policy(tmp_path: Path, checkpoint: Path) -> None:
    """Also for a planner that needs no engine."""
    from dayshift.engine.client import DayshiftClient

    file = tmp_path / "x.yaml"
    file.write_text(
        "planner: {memory: oracle}\nengine: {device: cpu}\n"
        f"policy: {{kind: smolvla, weights: {checkpoint}}}\n"
    )
    experiment = load_arms(file)[0].experiment
    with Engines(tmp_path / "engine") as engines:
        engine = engines.start(experiment)
        assert engine is not None
        assert engines.start(experiment) is engine  # shared by the arms of a matrix
        with DayshiftClient(engine.url()) as client:
            assert [info.name for info in client.policies()] == [SERVED_NAME]
