"""lerobot's own code trains what our engine then serves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from dayshift.policy.smolvla.dummy import SHAPES, write_dummy_checkpoint
from dayshift.policy.smolvla.policy import ActionRequest, SmolVLAPolicy
from dayshift.policy.training.assemble import assemble
from dayshift.policy.training.dataset import open_dataset, write_dataset
from dayshift.policy.training.demonstrations import Demonstration
from dayshift.policy.training.episodes import Episode
from dayshift.policy.training.lerobot_config import TrainingOptions
from dayshift.policy.training.train import Progress, train, train_on, trained
from dayshift.policy.training.vlm import SIZES, write_vlm
from dayshift.sim.tasks import list_tasks
from dayshift.types import DayshiftError


def _sentences() -> list[str]:
    return [task.sentence for task in list_tasks()]


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vlm")
    write_vlm(folder, _sentences(), SIZES["nano"])
    return folder


def test_the_small_vlm_is_the_dummys_shape(tmp_path: Path) -> None:
    write_vlm(tmp_path, _sentences(), SIZES["small"])
    config = json.loads((tmp_path / "config.json").read_text())
    vlm = SHAPES["small"].vlm
    for part in ("text_config", "vision_config"):
        for name in getattr(vlm, part).__struct_fields__:
            if name in config[part] and name not in ("head_dim", "model_type", "rms_norm_eps"):
                assert config[part][name] == getattr(getattr(vlm, part), name), name
    assert config["scale_factor"] == vlm.scale_factor


def test_the_tokenizer_knows_the_sentences(vlm: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(vlm / "tokenizer.json"))
    for sentence in _sentences():
        ids = tokenizer.encode(f"{sentence}\n").ids
        assert tokenizer.decode(ids) == f"{sentence}\n"
        assert len(ids) <= 24


def test_an_assembled_checkpoint_names_no_path(tmp_path: Path, vlm: Path) -> None:
    pretrained = tmp_path / "pretrained"
    write_dummy_checkpoint(pretrained, "small")
    config = json.loads((pretrained / "config.json").read_text())
    (pretrained / "config.json").write_text(json.dumps(config | {"vlm_model_name": str(vlm)}))
    assemble(pretrained, vlm, tmp_path / "checkpoint")
    for file in (tmp_path / "checkpoint").rglob("*.json"):
        assert str(vlm) not in file.read_text(), file.name
    assert (tmp_path / "checkpoint" / "vlm" / "tokenizer.json").is_file()


def test_a_trained_policy_is_served_and_can_be_trained_further(
    tmp_path: Path,
    vlm: Path,
    make_demonstration: Callable[..., Demonstration],
    make_episode: Callable[..., Episode],
) -> None:
    write_dataset([make_demonstration(1)], tmp_path / "dataset")
    dataset = open_dataset(tmp_path / "dataset")
    shown: list[Progress] = []

    def run(name: str, options: TrainingOptions) -> dict[str, torch.Tensor]:
        episodes: Iterator[Episode] = (make_episode(number) for number in range(2))
        folder = tmp_path / name
        pretrained = train(
            dataset, episodes, vlm, folder, options, num_control_steps=24, on_progress=shown.append
        )
        assert pretrained.resolve() == trained(folder).resolve()
        assemble(pretrained, vlm, folder / "checkpoint")
        policy = SmolVLAPolicy.load(folder / "checkpoint")
        image = np.zeros((128, 128, 3), np.uint8)
        request = ActionRequest(
            images={"image": image, "image2": image},
            state=np.zeros(8, np.float32),
            instruction="turn on the stove",
        )
        (chunk,) = policy.act([request])
        assert chunk.actions.shape == (16, 7)
        assert np.isfinite(chunk.actions).all()
        return {name: weight.clone() for name, weight in policy.model.named_parameters()}

    options = TrainingOptions(num_steps=2, size=SIZES["nano"], batch_size=2, device="cpu")
    before = run("first", options)
    further = TrainingOptions(
        num_steps=5000,
        size=SIZES["nano"],
        batch_size=2,
        device="cpu",
        start_from=trained(tmp_path / "first"),
        max_s=1.0,  # ends long before
    )
    after = run("second", further)
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) > len(before) / 2
    largest = max(float((before[name] - after[name]).abs().max()) for name in before)
    assert largest < 0.1  # it went on from there


def test_another_dataset_brings_no_other_sentence(
    tmp_path: Path, vlm: Path, make_demonstration: Callable[..., Demonstration]
) -> None:
    write_dataset([make_demonstration(1)], tmp_path / "stove")
    write_dataset([make_demonstration(2, task="libero_goal/put_the_bowl_on_the_plate")], tmp_path / "plate")
    with pytest.raises(DayshiftError, match=r"found put the bowl on the plate, allowed: the sentences of"):
        train_on(
            [open_dataset(tmp_path / name) for name in ("stove", "plate")],
            vlm,
            tmp_path / "training",
            TrainingOptions(num_steps=1, device="cpu"),
            parallel=1,
            on_progress=lambda _: None,
        )
