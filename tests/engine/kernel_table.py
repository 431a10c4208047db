"""What the kernels become on each generation of GPUs: the table in docs/engine-speed.md.

    python -m tests.engine.kernel_table     # compiles every kernel for every generation, and writes it

No GPU is needed, see `compiled_kernels`. A cell names what multiplies (wgmma, tcgen05 or mma; none where
a kernel is bound by memory), how memory comes (tma, cp.async), pdl where launches overlap, and the shared
memory of a program in KiB.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.engine.compiled_kernels import SHARED_MEMORY_BYTES, compiled
from tests.engine.kernel_launches import QWEN3_30B_A3B, launches

PAGE = Path(__file__).parents[2] / "docs" / "engine-speed.md"
BEGIN, END = "<!-- kernels by compute capability -->\n", "<!-- end of the kernels -->\n"
MARKS = {
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "mma": r"\bmma\.sync",
    "tma": r"cp\.async\.bulk\.tensor",
    "cp.async": r"cp\.async\.c[ag]",
    "pdl": r"griddepcontrol\.wait",
}


def table() -> str:
    """The table, in Markdown."""
    capabilities = list(SHARED_MEMORY_BYTES)
    lines = [
        "| | kernel | " + " | ".join(f"sm_{capability}" for capability in capabilities) + " |",
        "|---|---|" + "---|" * len(capabilities),
    ]
    for name, call in launches(QWEN3_30B_A3B).items():
        of_each = [dict(cells(call, capability)) for capability in capabilities]
        lines += [
            f"| {name} | `{kernel}` | " + " | ".join(of_one[kernel] for of_one in of_each) + " |"
            for kernel in of_each[0]
        ]
    return "\n".join(lines) + "\n"


def cells(call: Callable[[], object], capability: int) -> Iterator[tuple[str, str]]:
    """Kernel and cell of everything that a call launches, on a GPU of this capability."""
    for kernel in compiled(call, capability):
        found = [mark for mark, pattern in MARKS.items() if re.search(pattern, kernel.ptx)]
        yield kernel.kernel.__name__, ", ".join([*found, f"{kernel.shared_bytes / 1024:.0f} KiB"])


def without_sizes(text: str) -> str:
    """What stays when tiles are tuned: the kernels, and how they multiply and load."""
    return re.sub(r"(, )?\d+ KiB", "", text)


def in_page(page: str) -> str:
    """The table as the page has it."""
    return page.split(BEGIN)[1].split(END)[0]


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(page.replace(in_page(page), table()))
