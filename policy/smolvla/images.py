"""Camera images as the vision tower wants them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dayshift.policy.smolvla.processors import Normalizer


def to_model_images(images: Tensor, side: int, normalizer: Normalizer | None) -> Tensor:
    """uint8 (num_images, height, width, 3) -> float32 (num_images, 3, side, side) in [-1, 1].

    The aspect ratio is kept; the rest, left and above, is black. Bilinear, without antialiasing.
    `normalizer` is a checkpoint's own normalisation of this camera, if it has one.
    """
    x = images.permute(0, 3, 1, 2).float() / 255.0
    if normalizer is not None:
        x = normalizer.normalize(x)
    return pad_to_square(x, side) * 2.0 - 1.0


def pad_to_square(images: Tensor, side: int) -> Tensor:
    """Resize (num_images, channels, height, width) into a square, padded with 0 left and above."""
    height, width = images.shape[-2:]
    if (height, width) == (side, side):
        return images
    ratio = max(width / side, height / side)
    size = (int(height / ratio), int(width / ratio))
    resized = F.interpolate(images, size=size, mode="bilinear", align_corners=False)
    return F.pad(resized, (side - size[1], 0, side - size[0], 0))
