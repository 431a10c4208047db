"""The expert driven off course comes back, and what is recorded is what it would have done."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from dayshift.policy.smolvla.dummy import SHAPES, write_dummy_checkpoint
from dayshift.policy.training.demonstrations import DisturbedExpert
from dayshift.policy.training.train import assemble
from dayshift.policy.training.vlm import write_vlm
from dayshift.sim.libero_env import LiberoEnv
from dayshift.sim.rollout import rollout
from dayshift.sim.tasks import list_tasks
from dayshift.sim.types import Frame, RolloutSpec
from dayshift.types import Outcome


def test_a_disturbed_expert_still_succeeds_and_records_its_own_actions(env: LiberoEnv) -> None:
    policy = DisturbedExpert(env, is_disturbed=True)
    spec = RolloutSpec(
        task="turn on the stove", init_state_id=3, seed=3, max_steps=300, instruction="turn on the stove"
    )
    frames: list[Frame] = []
    result = rollout(env, policy, spec, lambda *_: None, frames.append)
    assert result.outcome is Outcome.DONE
    executed, labels = np.stack([frame.action for frame in frames]), np.stack(policy.labels)
    assert executed.shape == labels.shape
    disturbed = (executed != labels).any(axis=1)
    assert 2 <= disturbed.sum() < len(frames) / 2
    assert (executed[:, 6] == labels[:, 6]).all()  # never the gripper


def test_the_small_vlm_is_the_dummys_shape_and_knows_the_sentences(tmp_path: Path) -> None:
    sentences = [task.sentence for task in list_tasks()]
    write_vlm(tmp_path, sentences)
    config = json.loads((tmp_path / "config.json").read_text())
    text, vision = SHAPES["small"].vlm.text_config, SHAPES["small"].vlm.vision_config
    assert config["text_config"]["hidden_size"] == text.hidden_size
    assert config["vision_config"]["num_hidden_layers"] == vision.num_hidden_layers
    assert config["scale_factor"] == SHAPES["small"].vlm.scale_factor
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= text.vocab_size
    for sentence in sentences:
        ids = tokenizer.encode(f"{sentence}\n").ids
        assert tokenizer.decode(ids) == f"{sentence}\n"
        assert len(ids) <= 24


@pytest.mark.parametrize("shape", ["small"])
def test_an_assembled_checkpoint_names_no_path(tmp_path: Path, shape: str) -> None:
    pretrained, vlm = tmp_path / "pretrained", tmp_path / "vlm"
    write_dummy_checkpoint(pretrained, shape)
    config = json.loads((pretrained / "config.json").read_text())
    (pretrained / "config.json").write_text(json.dumps(config | {"vlm_model_name": str(vlm)}))
    write_vlm(vlm, ["turn on the stove"])
    assemble(pretrained, vlm, tmp_path / "checkpoint")
    for file in (tmp_path / "checkpoint").rglob("*.json"):
        assert str(tmp_path) not in file.read_text(), file.name
    assert (tmp_path / "checkpoint" / "vlm" / "tokenizer.json").is_file()
