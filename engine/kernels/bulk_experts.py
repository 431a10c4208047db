"""Router's picks and experts of 5 to 128 tokens in two launches and a sum, the weights by bulk copies.

Of both products one program for each processor has nearly all of its shared memory, a ring of rows of
weights. Each picks the experts of all tokens by itself, which for up to 32 takes no longer than a launch,
lists tokens by expert, and takes an equal share of the rows of all experts that were picked. Warps share a
row's columns and hold those of an expert's tokens in registers; tensor cores multiply 16 rows by 8 tokens.
The programs of down begin as soon as a processor is free, and have rows on their way before gate and up have
ended. Every sum has one order, whatever the order in which programs run. Another launch sums each token's
picks.

Written in CUDA C++ (`cuda_source`), for GPUs of capability 9.0 and more. `reference.route_top_k` and
`reference.moe_mlp` specify it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from dayshift.engine.kernels.cuda_source import cuda_kernel
from dayshift.engine.kernels.launch import num_processors, overlap_options, shared_memory_bytes
from dayshift.engine.kernels.routing import route_top_k
from dayshift.engine.kernels.tiled_experts import sum_picks
from dayshift.engine.models.config import Activation

_SOURCE = "bulk_experts.cu"
_LEAST_TOKENS = 5  # `few_token_experts` takes fewer
_MOST_TOKENS = 128
_MOST_ROUTED = 32  # tokens whose experts every program picks by itself
_MAX_EXPERTS = 256
_MAX_PICKED = 16
_MAX_SIZE, _MAX_INNER = 2048, 1024  # columns that the registers of a program hold of 16 tokens
_THREADS = 288  # eight warps that multiply, one that asks for weights
_PARTS = (8, 4)  # warps that share a row: of gate and up, of down
_SLOTS = (2, 1)  # of a ring, for 16 rows
_FLIGHT_BYTES = 65_536  # on their way at once
_KINDS: dict[Activation, int] = {"silu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}


@dataclass(frozen=True, slots=True)
class Ring:
    """How rows of weights pass through a program's shared memory; see `bulk_experts.cu`."""

    parts: int  # warps that share a row
    unit_slots: int  # that 16 rows take
    slots: int
    flight: int  # slots that are on their way at once
    shared_bytes: int  # of a launch


@dataclass(frozen=True, slots=True)
class Plan:
    """Of both launches."""

    most_tokens: int  # that the lists have places for
    tiles: int  # of 8 tokens of an expert that are multiplied at once
    gate_up: Ring
    down: Ring


def can_mix(
    x: torch.Tensor, logits: torch.Tensor, num_picked: int, gate_up: torch.Tensor, down: torch.Tensor
) -> bool:
    """`mix` can do it, and is the faster way on an H200: see docs/engine-speed.md."""
    return (
        overlap_options(x.device)["OVERLAPS"]
        and _LEAST_TOKENS <= len(x) <= _MOST_TOKENS
        and x.dtype in (torch.bfloat16, torch.float16)
        and all(tensor.dtype == x.dtype for tensor in (logits, gate_up, down))
        and all(tensor.is_contiguous() for tensor in (logits, gate_up, down))
        and all(tensor.data_ptr() % 16 == 0 for tensor in (x, gate_up, down))
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and _plan(x, logits, num_picked, down) is not None
    )


def mix(
    x: torch.Tensor,
    logits: torch.Tensor,
    num_picked: int,
    is_normalized: bool,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    activation: Activation = "silu",
) -> torch.Tensor:
    """`reference.moe_mlp` of what `reference.route_top_k` picks, for what `can_mix`."""
    (num_tokens, size), num_inner, device = x.shape, down.shape[2], x.device
    num_pairs = num_tokens * num_picked
    if num_tokens > _MOST_ROUTED:
        weights, routing = route_top_k(logits, num_picked, is_normalized)
    else:
        weights = torch.empty((num_tokens, num_picked), dtype=torch.float32, device=device)
        routing = logits
    inner = torch.empty((num_pairs, num_inner), dtype=x.dtype, device=device)
    outs = torch.empty((num_pairs, size), dtype=x.dtype, device=device)
    plan = _plan(x, logits, num_picked, down)
    assert plan is not None
    constants = _constants(plan, down, num_picked, is_normalized, activation)
    programs = num_processors(device)
    cuda_kernel(_SOURCE, "mix_gate_up", **constants).launch(
        programs, _THREADS, x, routing, gate_up, weights, inner, num_tokens, x.stride(0),
        shared_bytes=plan.gate_up.shared_bytes,
    )  # fmt: skip
    cuda_kernel(_SOURCE, "mix_down", **constants).launch(
        programs, _THREADS, inner, routing, down, outs, num_tokens,
        shared_bytes=plan.down.shared_bytes,
    )  # fmt: skip
    return sum_picks(outs, weights)


def _constants(
    plan: Plan, down: torch.Tensor, num_picked: int, is_normalized: bool, activation: Activation
) -> dict[str, int]:
    """Macros of the source."""
    num_experts, size, num_inner = down.shape
    rings = {"GATE_UP": plan.gate_up, "DOWN": plan.down}
    return {
        "SIZE": size,
        "INNER": num_inner,
        "EXPERTS": num_experts,
        "PICKED": num_picked,
        "ARE_PICKED": int(plan.most_tokens > _MOST_ROUTED),
        "IS_NORMALIZED": int(is_normalized),
        "MOST_TOKENS": plan.most_tokens,
        "TILES": plan.tiles,
        "KIND": _KINDS[activation],
        "IS_HALF": int(down.dtype == torch.float16),
        **{f"{name}_PARTS": ring.parts for name, ring in rings.items()},
        **{f"{name}_SLOTS": ring.unit_slots for name, ring in rings.items()},
        **{f"{name}_RING": ring.slots for name, ring in rings.items()},
        **{f"{name}_FLIGHT": ring.flight for name, ring in rings.items()},
        **{f"{name}_BYTES": ring.shared_bytes for name, ring in rings.items()},
    }


def _plan(x: torch.Tensor, logits: torch.Tensor, num_picked: int, down: torch.Tensor) -> Plan | None:
    _, size, num_inner = down.shape
    return plan_for(len(x), size, num_inner, logits.shape[1], num_picked, shared_memory_bytes(x.device))


@functools.cache
def plan_for(
    num_tokens: int, size: int, num_inner: int, num_experts: int, num_picked: int, shared_bytes: int
) -> Plan | None:
    """The plan on a GPU whose programs may have so much shared memory; None if none fits."""
    if (
        num_experts % 32
        or num_experts > _MAX_EXPERTS
        or not 0 < num_picked <= min(_MAX_PICKED, num_experts)
        or any(columns % (64 * parts) for columns, parts in zip((size, num_inner), _PARTS, strict=True))
        or size > _MAX_SIZE
        or num_inner > _MAX_INNER
    ):
        return None
    most_tokens = next(most for most in (8, _MOST_ROUTED, _MOST_TOKENS) if num_tokens <= most)
    tiles = 1 if most_tokens == 8 else 2
    num_pairs = most_tokens * num_picked
    masks = 4 * num_experts * -(-most_tokens // 32)
    lists = masks + 2 * num_experts + 4 * num_pairs + 6 * (num_experts + num_pairs // (8 * tiles)) + 4
    left = shared_bytes - 8 * 16 * 8 * tiles * 4 - lists - 64
    rings = [
        _ring(columns, parts, slots, left, shared_bytes - left)
        for columns, parts, slots in zip((size, num_inner), _PARTS, _SLOTS, strict=True)
    ]
    gate_up, down = rings
    return None if gate_up is None or down is None else Plan(most_tokens, tiles, gate_up, down)


def _ring(columns: int, parts: int, unit_slots: int, bytes_left: int, bytes_used: int) -> Ring | None:
    slot_bytes = 16 // unit_slots * columns * 2
    turn = unit_slots * (8 // parts)  # slots after which the same warps come again
    slots = bytes_left // (slot_bytes + 16) // turn * turn
    flight = min(-(-_FLIGHT_BYTES // slot_bytes), slots - 1)
    if flight < 1:
        return None
    return Ring(parts, unit_slots, slots, flight, bytes_used + slots * (slot_bytes + 16))
