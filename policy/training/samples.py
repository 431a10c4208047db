"""All episodes in the memory of the training device, and batches drawn from them.

lerobot's own reader decodes images for every sample (10 to 30 ms each); a small policy learns faster than
that by two orders of magnitude. A batch is what lerobot's preprocessor would have made of the reader's,
images shifted and lightened at random.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dayshift.policy.training.dataset import ACTION, STATE
from dayshift.policy.training.episodes import CAMERA_FEATURES, Episode
from dayshift.types import DayshiftError

Batch = dict[str, Tensor]
Preprocess = Callable[[dict], dict]

_MAX_SHIFT = 1 / 32  # of an image's side
_LIGHT = 0.15  # largest change of brightness and contrast
_GRIPPER = 6  # of the numbers of an action
_NEAR_STEPS = 10  # control steps around the moment in which the gripper changes,
_NEAR_WEIGHT = 2.0  # which are drawn more often


class Samples:
    """Room for `capacity` control steps; `add` may be called from another thread while batches are drawn."""

    def __init__(
        self,
        preprocess: Preprocess,
        sentences: Sequence[str],
        *,
        capacity: int,
        image_side: int,
        chunk_size: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self._preprocess, self._chunk_size, self._device = preprocess, chunk_size, device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._sentences = {sentence: number for number, sentence in enumerate(sentences)}
        told = preprocess({STATE: torch.zeros(len(sentences), 8), "task": list(sentences)})
        self._language = {name: value for name, value in told.items() if ".language." in name}

        def room(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros((capacity, *shape), dtype=dtype, device=device)

        self._states, self._actions = room(8, dtype=torch.float32), room(7, dtype=torch.float32)
        self._tasks, self._last = room(dtype=torch.int64), room(dtype=torch.int64)
        self._num_disturbed_before = room(dtype=torch.int64)
        self.num_control_steps = 0
        # Of control steps with images only:
        self._images = room(len(CAMERA_FEATURES), 3, image_side, image_side, dtype=torch.uint8)
        self._image_steps = room(dtype=torch.int64)
        self._weights = room(dtype=torch.float32)
        self._num_images = 0

    def add(self, episode: Episode) -> None:
        """Put an episode behind those that are there. Raises IndexError when there is no room."""
        first, end = self.num_control_steps, self.num_control_steps + len(episode.actions)
        if end > len(self._states):
            raise IndexError(f"room for {len(self._states)} control steps, {end} came")
        numbers = self._preprocess(
            {
                STATE: torch.from_numpy(episode.states),
                ACTION: torch.from_numpy(episode.actions),
                "task": [episode.sentence] * len(episode.actions),
            }
        )
        disturbed_before = np.cumsum(episode.is_disturbed) - episode.is_disturbed
        self._states[first:end] = numbers[STATE]
        self._actions[first:end] = numbers[ACTION]
        self._tasks[first:end] = self._sentences[episode.sentence]
        self._last[first:end] = end - 1
        self._num_disturbed_before[first:end] = torch.from_numpy(disturbed_before)

        seen = slice(self._num_images, self._num_images + len(episode.images))
        images = torch.from_numpy(episode.images).to(self._device)
        self._images[seen] = _reduced(images, self._images.shape[-1])
        self._image_steps[seen] = torch.from_numpy(first + episode.image_steps)
        self._weights[seen] = torch.from_numpy(_weights(episode)[episode.image_steps])
        self.num_control_steps, self._num_images = end, seen.stop

    def draw(self, batch_size: int) -> Batch:
        """A preprocessed batch of `batch_size` control steps and the chunks that begin there.

        `action_is_pad` marks what lies behind the episode's end, and what follows a disturbance: the expert's
        answer to that cannot be foreseen.
        """
        weights = self._weights[: self._num_images]
        seen = torch.multinomial(weights, batch_size, replacement=True, generator=self._generator)
        rows = self._image_steps[seen]
        steps = rows[:, None] + torch.arange(self._chunk_size, device=self._device)
        is_behind = steps > self._last[rows][:, None]
        steps = torch.minimum(steps, self._last[rows][:, None])
        num_before = self._num_disturbed_before
        is_unforeseen = num_before[steps] > num_before[rows][:, None]
        tasks = self._tasks[rows]
        return {
            **{name: self._draw_images(seen, camera) for camera, name in enumerate(CAMERA_FEATURES)},
            **{name: value[tasks] for name, value in self._language.items()},
            STATE: self._states[rows],
            ACTION: self._actions[steps],
            "action_is_pad": is_behind | is_unforeseen,
        }

    def _draw_images(self, seen: Tensor, camera: int) -> Tensor:
        """float32 (batch, 3, side, side) in [0, 1]; at the border the outermost pixel is repeated."""
        batch, side = len(seen), self._images.shape[-1]
        reach = round(_MAX_SHIFT * side)
        shifts = torch.randint(
            -reach, reach + 1, (2, batch, 1), generator=self._generator, device=self._device
        )
        y, x = (torch.arange(side, device=self._device) + shifts).clamp(0, side - 1)
        channels = torch.arange(3, device=self._device)
        images = self._images[
            seen[:, None, None, None],
            camera,
            channels[None, :, None, None],
            y[:, None, :, None],
            x[:, None, None, :],
        ]
        contrast, light = _LIGHT * (
            2 * torch.rand((2, batch, 1, 1, 1), generator=self._generator, device=self._device) - 1
        )
        return (images.float() / 255 * (1 + contrast) + light).clamp(0, 1)


def _reduced(images: Tensor, side: int) -> Tensor:
    """Images as the policy's own resizing leaves them: pixels averaged where it halves them."""
    factor, rest = divmod(images.shape[-1], side)
    if rest:
        raise DayshiftError(f"images have {images.shape[-1]} pixels; allowed: multiples of {side}")
    if factor == 1:
        return images
    means = F.avg_pool2d(images.flatten(0, 1).float(), factor)
    return means.round().to(torch.uint8).unflatten(0, images.shape[:2])


def _weights(episode: Episode) -> np.ndarray:
    """How often each control step is drawn, relative to others."""
    weights = np.ones(len(episode.actions), dtype=np.float32)
    for change in np.flatnonzero(np.diff(np.sign(episode.actions[:, _GRIPPER]))):
        weights[max(0, change - _NEAR_STEPS) : change + _NEAR_STEPS] = _NEAR_WEIGHT
    return weights


class EpisodesLeft:
    """Episodes on their way into `Samples`, in a thread of their own."""

    def __init__(self, samples: Samples, episodes: Iterable[Episode]) -> None:
        self._samples = samples
        self._arrived = threading.Condition()
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._is_running = True
        threading.Thread(target=self._run, args=(episodes,), name="episodes", daemon=True).start()

    def wait_for(self, num_control_steps: int) -> None:
        """Until so many are there, or all. Raises what went wrong on their way."""
        with self._arrived:
            self._arrived.wait_for(
                lambda: self._samples.num_control_steps >= max(1, num_control_steps) or not self._is_running
            )
        self.check()

    def check(self) -> None:
        """Raise what went wrong."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Take no more."""
        self._stop.set()

    def _run(self, episodes: Iterable[Episode]) -> None:
        try:
            for episode in episodes:
                if self._stop.is_set():
                    break
                self._samples.add(episode)
                with self._arrived:
                    self._arrived.notify_all()
        except BaseException as error:  # noqa: BLE001 (raised in the thread that trains)
            self._error = error
        with self._arrived:
            self._is_running = False
            self._arrived.notify_all()


@contextmanager
def filling(samples: Samples, episodes: Iterable[Episode]) -> Iterator[EpisodesLeft]:
    """`episodes` go into `samples` while the context lasts."""
    left = EpisodesLeft(samples, episodes)
    try:
        yield left
    finally:
        left.close()
