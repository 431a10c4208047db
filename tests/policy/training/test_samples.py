"""Batches hold what lerobot's reader and preprocessor give, and nothing that could not be foreseen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from dayshift.policy.smolvla.images import pad_to_square
from dayshift.policy.training.dataset import ACTION, STATE
from dayshift.policy.training.episodes import CAMERA_FEATURES, Episode
from dayshift.policy.training.samples import Batch, Samples, filling
from dayshift.types import DayshiftError

SENTENCES = ("turn on the stove", "put the bowl on the plate")
CHUNK = 4


def _preprocess(batch: dict) -> dict:
    """As lerobot's: the sentences become tokens."""
    tokens = torch.tensor([[SENTENCES.index(sentence)] for sentence in batch["task"]])
    return batch | {"observation.language.tokens": tokens}


def _samples(capacity: int = 100, image_side: int = 128) -> Samples:
    return Samples(
        _preprocess,
        SENTENCES,
        capacity=capacity,
        image_side=image_side,
        chunk_size=CHUNK,
        device=torch.device("cpu"),
        seed=0,
    )


def _rows(batch: Batch) -> Iterator[tuple[int, list[int], list[bool]]]:
    """Number of the control step, of the chunk's actions, and whether they are padding."""
    numbers = zip(batch[STATE][:, 0], batch[ACTION][..., 0], batch["action_is_pad"], strict=True)
    for state, actions, is_pad in numbers:
        yield int(state), actions.int().tolist(), is_pad.tolist()


def test_a_chunk_ends_with_its_episode(make_episode: Callable[..., Episode]) -> None:
    samples = _samples()
    samples.add(make_episode(0, num_steps=6))
    samples.add(make_episode(1, num_steps=6))
    for number, actions, is_pad in _rows(samples.draw(200)):
        wanted = range(number, number + CHUNK)
        assert is_pad == [step % 100 > 5 for step in wanted]
        assert actions == [min(step, number // 100 * 100 + 5) for step in wanted]


def test_what_follows_a_disturbance_is_not_learned(make_episode: Callable[..., Episode]) -> None:
    samples = _samples()
    samples.add(make_episode(num_steps=10, disturbed=(4, 5)))
    seen = {number: is_pad for number, _, is_pad in _rows(samples.draw(300))}
    assert seen[0] == [False] * 4
    assert seen[2] == [False, False, False, True]
    assert seen[4] == [False, True, True, True]
    assert seen[5] == [False, True, True, True]
    assert seen[6] == [False] * 4


def test_only_steps_with_images_are_drawn_with_their_own(make_episode: Callable[..., Episode]) -> None:
    samples = _samples()
    samples.add(make_episode(0, image_stride=3, num_steps=10))
    samples.add(make_episode(1, image_stride=3, num_steps=10, sentence=SENTENCES[1]))
    batch = samples.draw(200)
    numbers = batch[STATE][:, 0].int()
    assert set(numbers.tolist()) == {0, 3, 6, 9, 100, 103, 106, 109}
    assert torch.equal(batch["observation.language.tokens"][:, 0], numbers // 100)
    pixels = (10 * (numbers // 100) + numbers % 100)[:, None, None, None] / 255
    for camera in CAMERA_FEATURES:  # contrast and brightness change, by 0.15 at most
        assert batch[camera].shape == (200, 3, 128, 128)
        assert (batch[camera] - pixels).abs().max() < 0.2


def test_steps_near_a_change_of_the_gripper_are_drawn_more_often(
    make_episode: Callable[..., Episode],
) -> None:
    episode = make_episode(num_steps=100)
    episode.actions[:, 6] = np.where(np.arange(100) < 50, -1, 1)
    samples = _samples()
    samples.add(episode)
    numbers = samples.draw(4000)[STATE][:, 0]
    is_near = (numbers >= 40) & (numbers < 60)
    assert 0.28 < is_near.float().mean() < 0.39  # a third instead of a fifth


def test_reduced_images_are_what_the_policy_makes_of_them(make_episode: Callable[..., Episode]) -> None:
    episode = make_episode(num_steps=1)
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (3, 128, 128), generator=generator, dtype=torch.uint8)
    episode.images[:] = image.numpy()
    samples = _samples(image_side=64)
    samples.add(episode)
    kept = samples._images[0, 0].float()
    assert (kept - pad_to_square(image[None].float(), 64)[0]).abs().max() <= 0.5


def test_there_is_no_room_beyond_the_capacity(make_episode: Callable[..., Episode]) -> None:
    samples = _samples(capacity=20)
    samples.add(make_episode(num_steps=15))
    with pytest.raises(IndexError, match="room for 20 control steps, 30 came"):
        samples.add(make_episode(num_steps=15))


def test_what_goes_wrong_on_the_way_is_raised_where_training_is(
    make_episode: Callable[..., Episode],
) -> None:
    def episodes() -> Iterator[Episode]:
        yield make_episode(num_steps=5)
        raise OSError("the disk is gone")

    samples = _samples()
    with filling(samples, episodes()) as left, pytest.raises(OSError, match="the disk is gone"):
        left.wait_for(10)
    assert samples.num_control_steps == 5


def test_images_that_are_too_small_for_the_policy_are_refused(make_episode: Callable[..., Episode]) -> None:
    episode = make_episode(0, num_steps=2)
    small = replace(episode, images=episode.images[..., ::2, ::2])
    _samples(image_side=64).add(small)
    with pytest.raises(DayshiftError, match="images have 64 pixels; allowed: multiples of 128"):
        _samples(image_side=128).add(small)
