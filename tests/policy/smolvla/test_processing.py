"""Images, normalisation and texts against lerobot's own functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
from lerobot.lerobot_types import TransitionKey
from lerobot.policies.common.vla_utils import resize_with_pad
from lerobot.processor import NormalizerProcessorStep, UnnormalizerProcessorStep
from safetensors.torch import save_file

from dayshift.policy.smolvla.images import pad_to_square, to_model_images
from dayshift.policy.smolvla.processors import load_processors

_sides = st.integers(min_value=1, max_value=90)


@settings(max_examples=40, deadline=None)
@given(height=_sides, width=_sides, side=st.sampled_from((16, 33, 64)))
def test_resize_with_pad_is_lerobots(height: int, width: int, side: int) -> None:
    if max(height, width) >= side * min(height, width):
        return  # less than a pixel would be left: refused by both
    images = torch.rand(2, 3, height, width)
    assert torch.equal(pad_to_square(images, side), resize_with_pad(images, side, side, pad_value=0))


def test_padding_is_black_on_the_left_and_above() -> None:
    white = torch.full((1, 10, 40, 3), 255, dtype=torch.uint8)
    image = to_model_images(white, 20, None)[0, 0]
    assert (image[:15] == -1).all()
    assert (image[15:] == 1).all()


@pytest.mark.parametrize("mode", ["IDENTITY", "MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10"])
def test_normalisation_is_lerobots(mode: str, tmp_path: Path) -> None:
    features = {
        "observation.state": PolicyFeature(FeatureType.STATE, (4,)),
        "action": PolicyFeature(FeatureType.ACTION, (3,)),
    }
    rng = np.random.default_rng(0)
    stats: dict[str, dict[str, Any]] = {
        name: {stat: rng.normal(size=feature.shape) for stat in ("mean", "min", "q01", "q10")}
        for name, feature in features.items()
    }
    for of_feature in stats.values():
        for low, high in (("min", "max"), ("q01", "q99"), ("q10", "q90")):
            of_feature[high] = of_feature[low] + [0.0, *rng.uniform(0.1, 2, size=len(of_feature[low]) - 1)]
        of_feature["std"] = of_feature["max"] - of_feature["min"]  # the first number never varies
    norm_map = {kind: NormalizationMode(mode) for kind in (FeatureType.STATE, FeatureType.ACTION)}
    before = NormalizerProcessorStep(features=features, norm_map=norm_map, stats=stats)
    after = UnnormalizerProcessorStep(features=features, norm_map=norm_map, stats=stats)
    _write_pipelines(tmp_path, before, after)
    processors = load_processors(tmp_path)

    state, action = torch.randn(5, 4), torch.randn(5, 3)
    theirs = before._normalize_observation({"observation.state": state}, inverse=False)["observation.state"]
    their_action = after({TransitionKey.ACTION: action})[TransitionKey.ACTION]
    if mode == "IDENTITY":
        assert processors.inputs == {}
        assert processors.action is None
        assert torch.equal(theirs, state)
        return
    assert processors.action is not None
    ours = processors.inputs["observation.state"].normalize(state)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(processors.action.unnormalize(action), their_action, rtol=1e-5, atol=1e-6)


def _write_pipelines(folder: Path, before: NormalizerProcessorStep, after: UnnormalizerProcessorStep) -> None:
    for name, step, step_name in (
        ("policy_preprocessor", before, "normalizer_processor"),
        ("policy_postprocessor", after, "unnormalizer_processor"),
    ):
        save_file(step.state_dict(), folder / f"{name}.safetensors")
        steps = [
            {"registry_name": step_name, "config": step.get_config(), "state_file": f"{name}.safetensors"},
        ]
        if name == "policy_preprocessor":
            steps.append({"registry_name": "tokenizer_processor", "config": {"max_length": 48}})
        (folder / f"{name}.json").write_text(json.dumps({"name": name, "steps": steps}))
