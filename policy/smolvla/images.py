"""Camera images as the vision tower wants them: resized, normalised, cut into patches.

On CUDA all images of a batch, of whatever sizes and cameras, go up in one copy and become patches in one
launch; on a CPU torch ops do it image by image, which also specify the kernel.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from dayshift.engine.kernels.launch import padded
from dayshift.policy.smolvla.config import PatchShape
from dayshift.policy.smolvla.processors import Normalizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """An image of a batch, and which of the batch's images it is."""

    pixels: NDArray[np.uint8]  # (height, width, 3), contiguous
    normalizer: Normalizer | None  # a checkpoint's own normalisation of this camera, if it has one
    place: int


def images_to_patches(
    images: Sequence[PlacedImage],
    num_places: int,
    shape: PatchShape,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """(num_places, *shape.of_image) on `device`, in [-1, 1]; zeros where there is no image.

    The aspect ratio is kept; the rest, left and above, is black. Bilinear, without antialiasing.
    """
    out = torch.zeros((num_places, *shape.of_image), dtype=dtype, device=device)
    fill_patches(images, shape, out)
    return out


def fill_patches(images: Sequence[PlacedImage], shape: PatchShape, out: Tensor) -> None:
    """`images_to_patches` into (num_places, *shape.of_image). A place without an image is left as it is."""
    if out.is_cuda:
        packed = packed_images(images, shape, is_pinned=True)
        patches_triton(*(part.to(out.device, non_blocking=True) for part in packed), shape, out)
        return
    for image in images:
        pixels = torch.from_numpy(image.pixels[None].copy())
        out[image.place] = split_patches(
            to_model_images(pixels, shape.side, image.normalizer), shape.patch
        ).to(out.dtype)[0]


def to_model_images(images: Tensor, side: int, normalizer: Normalizer | None) -> Tensor:
    """uint8 (num_images, height, width, 3) -> float32 (num_images, 3, side, side) in [-1, 1]."""
    x = images.permute(0, 3, 1, 2).float() / 255.0
    if normalizer is not None:
        x = normalizer.normalize(x)
    return pad_to_square(x, side) * 2.0 - 1.0


def resized_size(height: int, width: int, side: int) -> tuple[int, int]:
    """Height and width of an image that has been made to fit into a square."""
    ratio = max(width / side, height / side)
    return int(height / ratio), int(width / ratio)


def pad_to_square(images: Tensor, side: int) -> Tensor:
    """Resize (num_images, channels, height, width) into a square, padded with 0 left and above."""
    height, width = images.shape[-2:]
    if (height, width) == (side, side):
        return images
    size = resized_size(height, width, side)
    resized = F.interpolate(images, size=size, mode="bilinear", align_corners=False)
    return F.pad(resized, (side - size[1], 0, side - size[0], 0))


def split_patches(images: Tensor, side: int) -> Tensor:
    """(num_images, channels, height, width) -> (num_images, num_patches, channels * side²), row by row.

    What is left over at the right and below belongs to no patch.
    """
    height, width = (length // side * side for length in images.shape[-2:])
    grid = images[..., :height, :width].unflatten(3, (-1, side)).unflatten(2, (-1, side))
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def packed_images(
    images: Sequence[PlacedImage], shape: PatchShape, *, is_pinned: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """What `patches_triton` reads, on the CPU: the images' bytes one after the other; of each image int64
    (first byte, height, width, resized height, resized width, place), and float32 (factor and summand of each
    channel, which make of a byte what the tower reads). `is_pinned`: copies to a device do not wait."""
    starts = np.cumsum([0, *(image.pixels.size for image in images)])
    pixels = torch.empty(int(starts[-1]), dtype=torch.uint8, pin_memory=is_pinned)
    fields = torch.empty((len(images), 6), dtype=torch.int64, pin_memory=is_pinned)
    factors = torch.empty((len(images), 2, 3), pin_memory=is_pinned)
    flat, rows, factor_rows = pixels.numpy(), fields.numpy(), factors.numpy()
    normalizers = {id(image.normalizer): image.normalizer for image in images}
    made = {key: _byte_factors(normalizer).numpy() for key, normalizer in normalizers.items()}
    for index, image in enumerate(images):
        height, width = image.pixels.shape[:2]
        flat[starts[index] : starts[index + 1]] = image.pixels.reshape(-1)
        rows[index] = (starts[index], height, width, *resized_size(height, width, shape.side), image.place)
        factor_rows[index] = made[id(image.normalizer)]
    return pixels, fields, factors


def _byte_factors(normalizer: Normalizer | None) -> Tensor:
    """(2, 3): factor and summand of each channel, byte -> 2 normalize(byte / 255) - 1."""
    if normalizer is None:
        return torch.tensor([[2 / 255] * 3, [-1.0] * 3])
    black, white = (normalizer.normalize(torch.full((3, 1, 1), value)).flatten() for value in (0.0, 1.0))
    return torch.stack(((white - black) * (2 / 255), 2 * black - 1))


def patches_triton(pixels: Tensor, fields: Tensor, factors: Tensor, shape: PatchShape, out: Tensor) -> None:
    """Fill the places of `out` that `packed_images` names. A program has a patch of an image."""
    num_patches, num_values = shape.of_image
    _images_to_patches[(num_patches, len(fields))](
        pixels,
        fields,
        factors,
        out,
        SIDE=shape.side,
        GRID=shape.grid,
        PATCH=shape.patch,
        COLUMNS=padded(num_values),
        num_warps=4,
        enable_fp_fusion=False,  # each result is rounded as torch rounds it: white stays exactly white
    )


@triton.jit
def _images_to_patches(
    pixels_ptr,
    fields_ptr,
    factors_ptr,
    out_ptr,
    SIDE: tl.constexpr,
    GRID: tl.constexpr,
    PATCH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    patch, image = tl.program_id(0), tl.program_id(1)
    fields_ptr += image * 6
    pixels_ptr += tl.load(fields_ptr)
    height, width = tl.load(fields_ptr + 1).to(tl.int32), tl.load(fields_ptr + 2).to(tl.int32)
    new_height, new_width = tl.load(fields_ptr + 3).to(tl.int32), tl.load(fields_ptr + 4).to(tl.int32)
    place = tl.load(fields_ptr + 5)

    value = tl.arange(0, COLUMNS)
    channel, within = value // (PATCH * PATCH), value % (PATCH * PATCH)
    is_value = channel < 3
    row = patch // GRID * PATCH + within // PATCH - (SIDE - new_height)
    column = patch % GRID * PATCH + within % PATCH - (SIDE - new_width)
    is_image = is_value & (row >= 0) & (column >= 0)
    # As torch does it: where the middle of a new pixel lies, and the two old ones around it.
    y_scale = tl.div_rn(height.to(tl.float32), new_height.to(tl.float32))
    x_scale = tl.div_rn(width.to(tl.float32), new_width.to(tl.float32))
    y = tl.maximum((row + 0.5) * y_scale - 0.5, 0.0)
    x = tl.maximum((column + 0.5) * x_scale - 0.5, 0.0)
    top, left = tl.minimum(y.to(tl.int32), height - 1), tl.minimum(x.to(tl.int32), width - 1)
    bottom, right = tl.minimum(top + 1, height - 1), tl.minimum(left + 1, width - 1)
    down, along = y - top, x - left

    upper = _between(pixels_ptr + (top * width) * 3 + channel, left, right, along, is_image)
    lower = _between(pixels_ptr + (bottom * width) * 3 + channel, left, right, along, is_image)
    factor = tl.load(factors_ptr + image * 6 + channel, mask=is_value, other=0.0)
    summand = tl.load(factors_ptr + image * 6 + 3 + channel, mask=is_value, other=0.0)
    pixel = (upper + (lower - upper) * down) * factor + summand
    out_ptr += (place * (GRID * GRID) + patch) * (3 * PATCH * PATCH) + value
    tl.store(out_ptr, tl.where(is_image, pixel, -1.0).to(out_ptr.dtype.element_ty), mask=is_value)


@triton.jit
def _between(row_ptr, left, right, along, is_image):
    """Two pixels of a row, mixed."""
    first = tl.load(row_ptr + left * 3, mask=is_image, other=0).to(tl.float32)
    second = tl.load(row_ptr + right * 3, mask=is_image, other=0).to(tl.float32)
    return first + (second - first) * along
