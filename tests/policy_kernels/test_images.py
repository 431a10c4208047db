"""Images to patches: the kernel against torch's resizing, whatever sizes and cameras are in a batch."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from dayshift.policy.smolvla.config import PatchShape
from dayshift.policy.smolvla.images import PlacedImage, images_to_patches, packed_images, patches_triton
from dayshift.policy.smolvla.processors import Normalizer

CPU = torch.device("cpu")
SIZES = [(64, 64), (20, 20), (48, 64), (31, 17), (9, 70)]  # the same, smaller, wider, higher, a strip
NORMALIZER = Normalizer(
    shift=torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1),
    divisor=torch.tensor([0.2, 0.3, 0.25]).view(3, 1, 1),
    factor=torch.ones(3, 1, 1),
    offset=0.0,
)

ToPatches = Callable[[Sequence[PlacedImage], int, PatchShape, torch.dtype], Tensor]


def _with_the_kernel(
    images: Sequence[PlacedImage], num_places: int, shape: PatchShape, dtype: torch.dtype
) -> Tensor:
    out = torch.zeros((num_places, *shape.of_image), dtype=dtype)
    patches_triton(*packed_images(images, shape), shape, out)
    return out


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def to_patches(request: pytest.FixtureRequest) -> ToPatches:
    if request.param == "interpreter":
        executor: ProcessPoolExecutor = request.getfixturevalue("interpreter")
        return lambda *args: executor.submit(_with_the_kernel, *args).result(timeout=300)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def on_gpu(
        images: Sequence[PlacedImage], num_places: int, shape: PatchShape, dtype: torch.dtype
    ) -> Tensor:
        return images_to_patches(images, num_places, shape, dtype, torch.device("cuda")).cpu()

    return on_gpu


def placed(sizes: Sequence[tuple[int, int]], normalizer: Normalizer | None = None) -> list[PlacedImage]:
    """Images of these sizes at every second place, the last one first; every second one normalised."""
    rng = np.random.default_rng(3)
    return [
        PlacedImage(
            pixels=rng.integers(0, 256, (*size, 3), dtype=np.uint8),
            normalizer=normalizer if number % 2 else None,
            place=2 * (len(sizes) - 1 - number),
        )
        for number, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("shape", [PatchShape(side=64, patch=16), PatchShape(side=44, patch=8)])
def test_the_kernel_makes_the_patches_that_torch_makes(to_patches: ToPatches, shape: PatchShape):
    images = placed(SIZES, NORMALIZER)
    actual = to_patches(images, 10, shape, torch.float32)
    wanted = images_to_patches(images, 10, shape, torch.float32, CPU)
    torch.testing.assert_close(actual, wanted, atol=2e-5, rtol=0)
    assert not actual[1::2].any()  # where there is no image
    assert all(image.any() for image in actual[::2])


@pytest.mark.gpu
def test_many_images_in_bfloat16():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    images, shape = placed([(256, 256)] * 64, NORMALIZER), PatchShape(side=512, patch=16)
    actual = images_to_patches(images, 128, shape, torch.bfloat16, torch.device("cuda")).cpu().float()
    wanted = images_to_patches(images, 128, shape, torch.float32, CPU)
    assert (actual - wanted).abs().max() < 0.04  # half a unit in the last place, of numbers below 8


def test_bytes_of_one_image_do_not_reach_another(to_patches: ToPatches):
    shape = PatchShape(side=16, patch=8)
    white, black = np.full((8, 8, 3), 255, dtype=np.uint8), np.zeros((12, 8, 3), dtype=np.uint8)
    images = [
        PlacedImage(pixels=pixels, normalizer=None, place=place)
        for place, pixels in enumerate((white, black, white))
    ]
    first, second, third = to_patches(images, 3, shape, torch.float32)
    assert torch.equal(first, torch.ones_like(first))
    assert torch.equal(second, -torch.ones_like(second))
    assert torch.equal(third, first)
