"""Weights arrive whole and in order."""

from __future__ import annotations

import pytest
import torch

from dayshift.engine.models import device_copy
from dayshift.engine.models.device_copy import on_device

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_arrive_whole_and_in_order(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setattr(device_copy, "_BUFFER_BYTES", 1000)  # most tensors take several turns
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.bfloat16, torch.float32, torch.uint8)
    shapes = [(0, 3), (), (1,), (7, 5), (33, 65), (500,), (3, 40, 21)] * 9
    tensors = [
        torch.randint(0, 200, shape, generator=generator).to(dtypes[index % 3])
        for index, shape in enumerate(shapes)
    ]
    tensors.append(torch.arange(600.0).view(20, 30).T)
    tensors.append(torch.arange(600.0).view(20, 30)[:, 10:20])

    arrived = list(on_device(enumerate(tensors), torch.device(device)))

    assert [key for key, _ in arrived] == list(range(len(tensors)))
    for (_, found), tensor in zip(arrived, tensors, strict=True):
        assert found.device.type == device
        assert found.dtype == tensor.dtype
        assert torch.equal(found.cpu(), tensor)


@pytest.mark.gpu
def test_memory_that_is_still_used_is_not_overwritten() -> None:
    """What a weight is copied into later may be what an op reads that is still queued."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    tensors = [torch.full((256, 1024), float(index)) for index in range(200)]
    sums = torch.zeros(200, device="cuda")
    for index, found in on_device(enumerate(tensors), torch.device("cuda")):
        sums[index] = (found.double() @ found.T.double()).mean()  # slower than a copy
        del found
    expected = torch.tensor([1024.0 * index * index for index in range(200)])
    assert torch.equal(sums.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_of_the_source_comes_through(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def broken():
        yield 0, torch.zeros(3)
        raise ValueError("the file ends here")

    with pytest.raises(ValueError, match="ends here"):
        list(on_device(broken(), torch.device(device)))
