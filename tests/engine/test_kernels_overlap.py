"""Kernels that may begin while the one before them ends touch nothing of it before they have waited."""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dayshift.engine.kernels import norm, one_token_linear, rotary, tiled_linear
from tests.engine.test_kernels_compile import Recorder, overlap_options

X = torch.empty(8, 4096, dtype=torch.bfloat16)
HEADS, KEYS = X.view(8, 32, 128), X.view(8, 32, 128)[:, :8]
POOL = torch.empty(4, 16, 8, 128, dtype=torch.bfloat16)
PLACE = (
    torch.zeros(8, dtype=torch.int64),
    torch.empty(64, 128),
    POOL,
    POOL,
    torch.zeros(8, dtype=torch.int64),
)
WEIGHT = torch.empty(6144, 4096, dtype=torch.bfloat16)

LAUNCHES: list[tuple[ModuleType, str, Callable[[], object], int]] = [
    (norm, "_rms_norm", lambda: norm.rms_norm(X, X[0], 1e-6, X), 2),  # 16 bytes each of its weight
    (rotary, "_rotate_store_token", lambda: rotary.rope_store_kv(HEADS, KEYS, KEYS, *PLACE), 0),
    (
        rotary,
        "_norm_rotate_store_token",
        lambda: rotary.norm_rope_store_kv(HEADS, KEYS, KEYS, X[0], X[0], 1e-6, *PLACE),
        0,
    ),
    (one_token_linear, "_multiply_token", lambda: one_token_linear.multiply(X[:1], WEIGHT), 0),
    (tiled_linear, "_multiply_rows", lambda: tiled_linear.multiply(X, WEIGHT), 0),
]


@pytest.mark.parametrize(("module", "name", "call", "num_loads"), LAUNCHES)
def test_nothing_is_touched_before_the_wait(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    module: ModuleType,
    name: str,
    call: Callable[[], object],
    num_loads: int,
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    recorder = Recorder(getattr(module, name))
    with monkeypatch.context() as patch:
        patch.setattr(module, name, recorder)
        patch.setattr(module, "overlap_options", lambda _: overlap_options(90))
        call()
    before, wait, after = recorder.compile(90).asm["ptx"].partition("griddepcontrol.wait")
    assert wait
    assert "st.global" in after
    assert not re.search(r"st\.global|cp\.async|atom|red\.", before)
    assert len(re.findall(r"ld\.global", before)) == num_loads
