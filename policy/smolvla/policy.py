"""SmolVLA as a policy: camera images, robot state and instruction in, action chunks out.

`prepare` checks one request and fails for it alone; `collate` makes one batch of many; the model runs
once for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dayshift.policy.smolvla.config import (
    IMAGE_PREFIX,
    STATE,
    SmolVLAConfig,
    load_config,
    load_policy_config,
)
from dayshift.policy.smolvla.folders import find_checkpoint, find_vlm
from dayshift.policy.smolvla.images import PlacedImage, images_to_patches
from dayshift.policy.smolvla.model import PrefixInputs, SmolVLA
from dayshift.policy.smolvla.processors import Processors, load_processors
from dayshift.policy.smolvla.tokenizer import InstructionTokenizer
from dayshift.policy.smolvla.transfer import stack_on, to_device
from dayshift.policy.smolvla.weights import load_model
from dayshift.types import DayshiftError


class InvalidActionRequestError(DayshiftError):
    """A request that does not fit the policy; says what is wrong and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRequest:
    """One robot's observation.

    `images` are uint8 (height, width, 3), RGB, by camera name as the policy was trained with it
    (`observation.images.image` or just `image`); `state` is float32 (state_dim,) in dataset units.
    """

    images: Mapping[str, NDArray[np.uint8]]
    state: NDArray[np.float32]
    instruction: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionChunk:
    """The actions that answer one request, float32 (chunk_size, action_dim) in dataset units."""

    actions: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A checked request, on the CPU."""

    images: tuple[tuple[str, NDArray[np.uint8]], ...]  # (camera, (height, width, 3)), in the policy's order
    num_empty_cameras: int
    token_ids: tuple[int, ...]
    state: Tensor  # float32 (max_state_dim,), normalised and padded


class SmolVLAPolicy:
    """A loaded checkpoint. Make it with `load`."""

    def __init__(
        self, config: SmolVLAConfig, processors: Processors, tokenizer: InstructionTokenizer, model: SmolVLA
    ) -> None:
        self.config = config
        self.processors = processors
        self.model = model
        self._tokenizer = tokenizer
        names = {name: name for name in config.cameras}
        names |= {old: new for old, new in processors.renamed.items() if new in names}
        self._cameras = names | {name.removeprefix(IMAGE_PREFIX): to for name, to in names.items()}

    @classmethod
    def load(
        cls,
        checkpoint: str | Path,
        *,
        vlm: str | Path | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        num_steps: int | None = None,
    ) -> SmolVLAPolicy:
        """Load a lerobot checkpoint: a folder or a hub id.

        `vlm`, a folder, takes the place of the checkpoint's vision-language model, `num_steps` that of
        its number of Euler steps. Raises DayshiftError when something is missing, does not fit or is not
        supported.
        """
        if num_steps is not None and num_steps < 1:
            raise DayshiftError(f"num_steps is {num_steps}; it must be at least 1")
        folder = find_checkpoint(checkpoint)
        policy = load_policy_config(folder)
        processors = load_processors(folder)
        vlm_folder = find_vlm(folder, policy.vlm_model_name) if vlm is None else Path(vlm)
        config = load_config(folder, policy, vlm_folder)
        tokenizer = InstructionTokenizer(
            vlm_folder, max_length=processors.max_text_length, ends_with_newline=processors.ends_with_newline
        )
        model = load_model(
            folder,
            config,
            max_text_length=processors.max_text_length,
            num_steps=policy.num_steps if num_steps is None else num_steps,
            image_tokens=tokenizer.image_tokens() if policy.add_image_special_tokens else None,
            dtype=dtype,
            device=torch.device(device),
        )
        return cls(config, processors, tokenizer, model)

    def act(self, requests: Sequence[ActionRequest], noise: Tensor | None = None) -> list[ActionChunk]:
        """Answer a batch. `noise` is float32 (batch, chunk_size, max_action_dim), else drawn from torch's
        generator. Raises InvalidActionRequestError when any request is malformed."""
        inputs = self.collate([self.prepare(request) for request in requests])
        if noise is None:
            shape = (len(requests), self.config.policy.chunk_size, self.config.policy.max_action_dim)
            noise = torch.randn(shape, device=self.model.device)
        actions = self.model.sample_actions(inputs, noise.to(self.model.device))
        return self.finish(actions)

    def prepare(self, request: ActionRequest) -> PreparedRequest:
        """Check and normalise one request. Raises InvalidActionRequestError."""
        images = self._check_images(request.images)
        num_missing = len(self.config.cameras) + self.config.policy.empty_cameras - len(images)
        token_ids = self._tokenizer.encode(request.instruction)
        if not token_ids:
            raise InvalidActionRequestError("the instruction is empty")
        return PreparedRequest(
            images=tuple((name, images[name]) for name in self.config.cameras if name in images),
            num_empty_cameras=min(num_missing, self.config.policy.empty_cameras),
            token_ids=token_ids,
            state=self._check_state(request.state),
        )

    def collate(
        self,
        requests: Sequence[PreparedRequest],
        images: Tensor | None = None,
        *,
        text_length: int | None = None,
    ) -> PrefixInputs:
        """One batch on the model's device, texts padded to `text_length`, else to the longest. `images` are
        theirs as `embed_images` leaves them, if that has been done before."""
        batch, device = len(requests), self.model.device
        images = self.embed_images(requests) if images is None else images
        text_length = text_length or max(len(request.token_ids) for request in requests)
        empty_cameras = self.config.policy.empty_cameras
        token_ids = torch.zeros((batch, text_length), dtype=torch.int64)
        token_mask = torch.zeros((batch, text_length), dtype=torch.bool)
        image_mask = torch.zeros((batch, images.shape[1]), dtype=torch.bool)
        empty_mask = torch.zeros((batch, empty_cameras), dtype=torch.bool)
        for row, request in enumerate(requests):
            token_ids[row, : len(request.token_ids)] = torch.tensor(request.token_ids)
            token_mask[row, : len(request.token_ids)] = True
            image_mask[row, : len(request.images)] = True
            empty_mask[row, : request.num_empty_cameras] = True
        return PrefixInputs(
            images=images,
            image_mask=to_device(image_mask, device),
            empty_mask=to_device(empty_mask, device),
            token_ids=to_device(token_ids, device),
            token_mask=to_device(token_mask, device),
            state=stack_on([request.state for request in requests], device),
        )

    def embed_images(self, requests: Sequence[PreparedRequest]) -> Tensor:
        """`SmolVLA.embed_images` of as many images for each robot as any of them has."""
        num_images = max(len(request.images) for request in requests)
        patches = images_to_patches(
            self.placed_images(requests, num_images),
            len(requests) * num_images,
            self.config.patch_shape,
            self.model.dtype,
            self.model.device,
        )
        return self.model.embed_images(patches.unflatten(0, (len(requests), num_images)))

    def placed_images(self, requests: Sequence[PreparedRequest], num_images: int) -> list[PlacedImage]:
        """The images of a batch in which each robot has places for `num_images`; its own come first."""
        return [
            PlacedImage(
                pixels=pixels,
                normalizer=self.processors.inputs.get(camera),
                place=row * num_images + index,
            )
            for row, request in enumerate(requests)
            for index, (camera, pixels) in enumerate(request.images)
        ]

    def finish(self, actions: Tensor) -> list[ActionChunk]:
        """Model output (batch, chunk_size, max_action_dim) -> chunks in dataset units."""
        actions = actions[..., : self.config.action_dim].cpu()
        if self.processors.action is not None:
            actions = self.processors.action.unnormalize(actions)
        return [ActionChunk(actions=chunk) for chunk in actions.numpy()]

    def _check_images(self, images: Mapping[str, NDArray[np.uint8]]) -> dict[str, NDArray[np.uint8]]:
        checked: dict[str, NDArray[np.uint8]] = {}
        for name, image in images.items():
            camera = self._cameras.get(name)
            if camera is None:
                allowed = ", ".join(self.config.cameras)
                raise InvalidActionRequestError(f"there is no camera {name!r}; the policy has {allowed}")
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
                raise InvalidActionRequestError(
                    f"image {name!r} is {image.dtype} {image.shape}; wanted is uint8 (height, width, 3)"
                )
            if min(image.shape[:2]) * self.config.image_side <= max(image.shape[:2]):
                raise InvalidActionRequestError(f"image {name!r} of {image.shape} is too thin to be resized")
            if camera in checked:
                raise InvalidActionRequestError(f"image {name!r} is a second image of {camera}")
            checked[camera] = np.ascontiguousarray(image)
        if not checked:
            raise InvalidActionRequestError("there is no image; at least one camera is needed")
        return checked

    def _check_state(self, state: NDArray[np.float32]) -> Tensor:
        dim = self.config.state_dim
        if state.shape != (dim,) or not np.isfinite(state).all():
            raise InvalidActionRequestError(f"state has shape {state.shape}; wanted are {dim} finite numbers")
        checked = torch.from_numpy(np.array(state, dtype=np.float32))
        normalizer = self.processors.inputs.get(STATE)
        if normalizer is not None:
            checked = normalizer.normalize(checked)
        return F.pad(checked, (0, self.config.policy.max_state_dim - dim))
