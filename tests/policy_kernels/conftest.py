"""A process in which Triton interprets. No lerobot and no simulator: a GPU's machine may lack them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process whose Triton interprets; tensors are shared with it. It and its environment end with the
    module's tests, because others look for processes that were left and compile kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
            yield executor
