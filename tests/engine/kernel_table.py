"""What the kernels become on each generation of GPUs: the table in docs/engine-speed.md.

    python -m tests.engine.kernel_table     # compiles every kernel for every generation, and writes it

No GPU is needed, see `test_kernels_compile`. A cell names what multiplies (wgmma, tcgen05 or mma; none where
a kernel is bound by memory), how memory comes (tma, cp.async), pdl where launches overlap, and the shared
memory of a program in KiB.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import JITFunction

from dayshift.engine.kernels import (
    activation,
    attention,
    few_token_experts,
    invariant,
    norm,
    one_token_linear,
    rotary,
    routing,
    sampling,
    tiled_experts,
    tiled_linear,
)
from tests.engine.test_kernels_compile import SHARED_MEMORY_BYTES, Recorder, overlap_options

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


def launches() -> dict[str, Callable[[], object]]:
    """Launches at sizes of Qwen3-30B-A3B in bfloat16, by what they do."""
    hidden, inner, num_experts, heads, head_dim = 2048, 768, 128, (32, 4), 128
    half = torch.bfloat16
    x, weight = torch.empty(4096, hidden, dtype=half), torch.empty(5120, hidden, dtype=half)
    factors = torch.empty(hidden)
    q, k = (torch.empty(200, n, head_dim, dtype=half) for n in heads)
    pool, cos_sin = torch.empty(4, 16, heads[1], head_dim, dtype=half), torch.empty(8192, head_dim)
    positions = torch.zeros(200, dtype=torch.int64)
    experts = (
        torch.empty(num_experts, 2 * inner, hidden, dtype=half),
        torch.empty(num_experts, hidden, inner, dtype=half),
    )

    def attend(op: Callable[..., Any], num_seqs: int, num_tokens: int) -> Callable[[], object]:
        tables, lens = torch.zeros(num_seqs, 512, dtype=torch.int32), torch.zeros(num_seqs, dtype=torch.int32)
        starts = torch.zeros(num_seqs + 1, dtype=torch.int32)
        return lambda: op(q[:num_tokens], pool, pool, tables, lens, starts, cos_sin, 0.1)

    def mix(op: Callable[..., Any], num_tokens: int) -> Callable[[], object]:
        picked = torch.zeros(num_tokens, 8, dtype=torch.int64)
        return lambda: op(x[:num_tokens], torch.empty(num_tokens, 8), picked, *experts)

    return {
        "norm": lambda: norm.rms_norm(x[:8], factors, 1e-6, x[:8]),
        "gated activation": lambda: activation.silu_mul(x[:8]),
        "norm, rotate, store KV": lambda: rotary.norm_rope_store_kv(
            q, k, k, factors[:head_dim], factors[:head_dim], 1e-6, positions, cos_sin, pool, pool, positions
        ),
        "linear, 1 token": lambda: one_token_linear.multiply(
            x[:1], weight, residual=x[:1], norm_weight=factors
        ),
        "linear, 16 tokens": lambda: tiled_linear.multiply(x[:16], weight),
        "linear, batch-invariant": lambda: invariant.linear(x[:8], weight),
        "attention, 8 decodes": attend(attention.paged_attention, 8, 8),
        "attention, a chunk": attend(attention.paged_attention, 1, 200),
        "attention, batch-invariant": attend(invariant.paged_attention, 1, 200),
        "router with norm": lambda: routing.norm_router(x[:4], x[:4], factors, 1e-6, weight[:num_experts]),
        "picks": lambda: routing.route_top_k(x[:8, :num_experts].contiguous(), 8, True),
        "experts, 1 token": mix(few_token_experts.moe_mlp, 1),
        "experts, 40 tokens": mix(tiled_experts.moe_mlp, 40),
        "experts, 4,096 tokens": mix(tiled_experts.moe_mlp, 4096),
        "draw": lambda: sampling.draw_by_race(
            torch.empty(8, 151936), torch.ones(8), torch.zeros(8, dtype=torch.int64)
        ),
    }


def table() -> str:
    """The table, in Markdown."""
    capabilities = list(SHARED_MEMORY_BYTES)
    lines = [
        "| | kernel | " + " | ".join(f"sm_{capability}" for capability in capabilities) + " |",
        "|---|---|" + "---|" * len(capabilities),
    ]
    for name in launches():
        cells = [dict(compiled(name, capability)) for capability in capabilities]
        lines += [
            f"| {name} | `{kernel}` | " + " | ".join(of_kernel[kernel] for of_kernel in cells) + " |"
            for kernel in cells[0]
        ]
    return "\n".join(lines) + "\n"


def compiled(name: str, capability: int) -> Iterator[tuple[str, str]]:
    """Kernel and cell of everything that a launch consists of, on a GPU of this capability."""
    recorders: dict[str, Recorder] = {}

    def record(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        recorder = recorders.setdefault(kernel.__name__, Recorder(kernel))
        recorder.launches[:] = [(args, kwargs)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        for module in [module for path, module in sys.modules.items() if ".engine.kernels." in path]:
            if hasattr(module, "overlap_options"):
                patch.setattr(module, "overlap_options", lambda _: overlap_options(capability))
            if hasattr(module, "shared_memory_bytes"):
                patch.setattr(module, "shared_memory_bytes", lambda _: SHARED_MEMORY_BYTES[capability])
        launches()[name]()
    for kernel, recorder in recorders.items():
        made = recorder.compile(capability)
        assert made.metadata.shared <= SHARED_MEMORY_BYTES[capability], (name, kernel)
        found = [mark for mark, pattern in MARKS.items() if re.search(pattern, made.asm["ptx"])]
        yield kernel, ", ".join([*found, f"{made.metadata.shared / 1024:.0f} KiB"])


def without_sizes(text: str) -> str:
    """What stays when tiles are tuned: the kernels, and how they multiply and load."""
    return re.sub(r"(, )?\d+ KiB", "", text)


def in_page(page: str) -> str:
    """The table as the page has it."""
    return page.split(BEGIN)[1].split(END)[0]


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(page.replace(in_page(page), table()))
