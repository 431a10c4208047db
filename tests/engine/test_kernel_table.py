"""The page's table of kernels by compute capability is what the compiler makes of them."""

import pytest

from tests.engine import kernel_table
from tests.engine.kernel_launches import QWEN3_30B_A3B, launches


@pytest.mark.slow  # a hundred kernels
def test_the_page_has_what_the_compiler_makes(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Sizes change as tiles are tuned; `python -m tests.engine.kernel_table` writes them anew."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    page = kernel_table.PAGE.read_text()
    expected = kernel_table.without_sizes(kernel_table.table())
    assert kernel_table.without_sizes(kernel_table.in_page(page)) == expected


def test_a_kernel_for_hopper_is_compiled_with_its_instructions(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    call = launches(QWEN3_30B_A3B)["linear, batch-invariant"]
    ((kernel, cell),) = kernel_table.cells(call, 90)
    assert kernel == "_multiply_tile"
    assert "mma" in cell
    assert "cp.async" in cell
