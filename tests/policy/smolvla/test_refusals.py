"""A bad checkpoint or request is one line that says what, where, and what is allowed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dayshift.policy.smolvla.parity import random_requests
from dayshift.policy.smolvla.parity_cases import ParityCase
from dayshift.policy.smolvla.policy import ActionRequest, InvalidActionRequestError, SmolVLAPolicy
from dayshift.types import DayshiftError

Damage = Callable[[Path], object]


def _edit(name: str, **changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def _edit_part(name: str, part: str, **changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text())
        content[part] |= changes
        path.write_text(json.dumps(content))

    return damage


def _remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def _change_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return damage


def _cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def _foreign_step(folder: Path) -> None:
    path = folder / "policy_preprocessor.json"
    content = json.loads(path.read_text())
    content["steps"].append({"registry_name": "delta_action_processor", "config": {}})
    path.write_text(json.dumps(content))


BAD_CHECKPOINTS: dict[str, tuple[Damage, str]] = {
    "no config": (_remove("config.json"), r"has no config\.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), r"config\.json: .*"),
    "wrong type in config": (_edit("config.json", chunk_size="ten"), r"chunk_size"),
    "other policy": (_edit("config.json", type="pi0"), r"'pi0' is not supported; supported is 'smolvla'"),
    "aloha": (_edit("config.json", adapt_to_pi_aloha=True), r"adapt_to_pi_aloha is not supported"),
    "adapter": (_edit("config.json", use_peft=True), r"merge them"),
    "no Euler step": (_edit("config.json", num_steps=0), r"num_steps 0"),
    "no action": (_edit("config.json", output_features={}), r"no feature action"),
    "oblong images": (_edit("config.json", resize_imgs_with_padding=[64, 96]), r"64 x 96"),
    "image size": (_edit("config.json", resize_imgs_with_padding=[80, 80]), r"5 x 5 patches"),
    "uneven expert": (_edit("config.json", num_expert_layers=3), r"no multiple of num_expert_layers 3"),
    "lonely layer": (
        _edit("config.json", num_expert_layers=2, self_attn_every_n_layers=1),
        r"text layer 1, where there is no expert layer",
    ),
    "no weights": (_remove("model.safetensors"), r"has no model\.safetensors"),
    "weights cut off": (_cut_weights, r"not a readable safetensors file"),
    "weight missing": (
        _change_weights(lambda w: w.pop("model.state_proj.bias")),
        r"lacks 1 weights, model\.state_proj\.bias",
    ),
    "weight unknown": (
        _change_weights(lambda w: w.update({"model.extra": torch.zeros(1)})),
        r"holds unknown 1 weights, model\.extra",
    ),
    "weight of other shape": (
        _change_weights(lambda w: w.update({"model.state_proj.bias": torch.zeros(3)})),
        r"model\.state_proj\.bias has shape \(3,\), config\.json implies \(64,\)",
    ),
    "no preprocessor": (_remove("policy_preprocessor.json"), r"migrate_policy_normalization"),
    "foreign step": (_foreign_step, r"step delta_action_processor is not supported; supported are"),
    "no tokenizer": (_remove("vlm/tokenizer.json"), r"has no tokenizer\.json"),
    "no special tokens": (_edit("vlm/tokenizer_config.json", fake_image_token=None), r"no fake_image_token"),
    "no VLM config": (_remove("vlm/config.json"), r"vlm has no config\.json"),
    "other text layers": (
        _edit_part("vlm/config.json", "text_config", model_type="qwen2"),
        r"'qwen2'.*supported: llama",
    ),
    "other activation": (
        _edit_part("vlm/config.json", "vision_config", hidden_act="relu"),
        r"'relu'; supported: gelu_pytorch_tanh",
    ),
}


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_bad_checkpoint(name: str, checkpoint: Path, tmp_path: Path) -> None:
    damage, message = BAD_CHECKPOINTS[name]
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    damage(folder)
    with pytest.raises(DayshiftError, match=message) as caught:
        SmolVLAPolicy.load(folder)
    assert "\n" not in str(caught.value)


def test_missing_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DayshiftError, match="does not exist; give a folder or a hub id"):
        SmolVLAPolicy.load(tmp_path / "nowhere")


def test_no_euler_step(checkpoint: Path) -> None:
    with pytest.raises(DayshiftError, match="num_steps is 0; it must be at least 1"):
        SmolVLAPolicy.load(checkpoint, num_steps=0)


def test_missing_vlm(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("vlm"))
    _edit("config.json", vlm_model_name=str(tmp_path / "gone"))(folder)
    with pytest.raises(DayshiftError, match=r"vision-language model .*gone does not exist"):
        SmolVLAPolicy.load(folder)
    assert SmolVLAPolicy.load(folder, vlm=checkpoint / "vlm").config.action_dim == 7


def _with_image(request: ActionRequest, image: Any) -> ActionRequest:
    return replace(request, images={**request.images, "image": image})


BAD_REQUESTS: dict[str, tuple[Callable[[ActionRequest], ActionRequest], str]] = {
    "unknown camera": (
        lambda r: replace(r, images={"top": r.images["image"]}),
        r"no camera 'top'; the policy has observation\.images\.image, observation\.images\.image2",
    ),
    "no camera": (lambda r: replace(r, images={}), r"at least one camera"),
    "float image": (lambda r: _with_image(r, np.zeros((8, 8, 3), np.float32)), r"wanted is uint8"),
    "grey image": (lambda r: _with_image(r, np.zeros((8, 8), np.uint8)), r"wanted is uint8 \(height"),
    "empty image": (lambda r: _with_image(r, np.zeros((0, 8, 3), np.uint8)), r"wanted is uint8"),
    "thin image": (lambda r: _with_image(r, np.zeros((1, 500, 3), np.uint8)), r"too thin"),
    "camera twice": (
        lambda r: replace(r, images={**r.images, "observation.images.image": r.images["image"]}),
        r"a second image of observation\.images\.image",
    ),
    "short state": (lambda r: replace(r, state=r.state[:5]), r"shape \(5,\); wanted are 8 finite"),
    "NaN in state": (lambda r: replace(r, state=r.state * np.nan), r"8 finite numbers"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_request(name: str, policy: SmolVLAPolicy, case: ParityCase) -> None:
    spoil, message = BAD_REQUESTS[name]
    with pytest.raises(InvalidActionRequestError, match=message):
        policy.prepare(spoil(random_requests(case)[0]))
