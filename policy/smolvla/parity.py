"""Our SmolVLA against lerobot's, on random checkpoints of many shapes that lerobot writes.

    python -m dayshift.policy.smolvla.parity [--full-size]

prints one row per configuration: the largest absolute difference of any action, in dataset units and fp32,
over single requests and over one batch of instructions of different lengths. Exit code 1 when
any reaches the limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from dayshift.policy.smolvla.config import IMAGE_PREFIX, STATE
from dayshift.policy.smolvla.parity_cases import CASES, FULL_SIZE, ParityCase, Reference, write_checkpoint
from dayshift.policy.smolvla.policy import ActionRequest, SmolVLAPolicy

MAX_DIFFERENCE = 1e-4
INSTRUCTIONS = ("put the bowl on the stove", "turn on", "open the middle drawer of the cabinet")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityResult:
    """Largest absolute differences of one configuration, float32, in dataset units."""

    num_parameters: int  # as we load them: without what no action depends on
    largest_action: float
    single: float  # each request alone, against lerobot alone
    batch: float  # one batch, against lerobot's batch
    batch_to_single: float  # our batch against our single runs

    @property
    def worst(self) -> float:
        """The largest of the three."""
        return max(self.single, self.batch, self.batch_to_single)


def random_requests(case: ParityCase, seed: int = 0) -> list[ActionRequest]:
    """One request per instruction, with random images and states."""
    rng = np.random.default_rng(seed)
    return [
        ActionRequest(
            images={
                name: rng.integers(0, 256, (*size, 3), dtype=np.uint8)
                for name, size in case.cameras.items()
                if name not in case.unsent_cameras
            },
            state=rng.normal(size=case.state_dim).astype(np.float32),
            instruction=instruction,
        )
        for instruction in INSTRUCTIONS
    ]


def lerobot_actions(
    reference: Reference, requests: Sequence[ActionRequest], noise: torch.Tensor
) -> NDArray[np.float32]:
    """lerobot's answer, (batch, chunk_size, action_dim) in dataset units."""
    observation: dict[str, object] = {
        f"{IMAGE_PREFIX}{name}": torch.stack(
            [torch.from_numpy(request.images[name]).permute(2, 0, 1) / 255 for request in requests]
        )
        for name in requests[0].images
    }
    observation[STATE] = torch.stack([torch.from_numpy(request.state) for request in requests])
    observation["task"] = [request.instruction for request in requests]
    actions = reference.policy.predict_action_chunk(reference.before(observation), noise=noise)
    return reference.after(actions).numpy()


def our_actions(
    policy: SmolVLAPolicy, requests: Sequence[ActionRequest], noise: torch.Tensor
) -> NDArray[np.float32]:
    """Our answer, (batch, chunk_size, action_dim) in dataset units."""
    return np.stack([chunk.actions for chunk in policy.act(requests, noise)])


def compare(case: ParityCase, folder: Path) -> ParityResult:
    """Write a checkpoint of `case` into `folder`, load it both ways, and compare the actions."""
    reference = write_checkpoint(folder, case)
    policy = SmolVLAPolicy.load(folder)
    requests = random_requests(case)
    settings = policy.config.policy
    noise = torch.randn(
        (len(requests), settings.chunk_size, settings.max_action_dim),
        generator=torch.Generator().manual_seed(1),
    )
    rows = range(len(requests))
    ours = np.concatenate([our_actions(policy, requests[i : i + 1], noise[i : i + 1]) for i in rows])
    theirs = np.concatenate([lerobot_actions(reference, requests[i : i + 1], noise[i : i + 1]) for i in rows])
    ours_batched = our_actions(policy, requests, noise)
    theirs_batched = lerobot_actions(reference, requests, noise)
    return ParityResult(
        num_parameters=sum(parameter.numel() for parameter in policy.model.parameters()),
        largest_action=_largest(theirs),
        single=_largest(ours - theirs),
        batch=_largest(ours_batched - theirs_batched),
        batch_to_single=_largest(ours_batched - ours),
    )


def _largest(x: NDArray[np.float32]) -> float:
    return float(np.abs(x).max())


def main() -> None:
    """Print the table; exit with 1 when a difference reaches `MAX_DIFFERENCE`."""
    parser = argparse.ArgumentParser(description="Compare our SmolVLA with lerobot's.")
    parser.add_argument(
        "--full-size", action="store_true", help="the 450M shape too (8 GB, minutes on a CPU)"
    )
    cases = (*CASES, FULL_SIZE) if parser.parse_args().full_size else CASES
    table = Table(
        "configuration",
        "parameters",
        "largest action",
        "single",
        "batch",
        "batch to single",
        box=box.MARKDOWN,
    )
    worst = 0.0
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            result = compare(case, Path(folder))
        differences = (result.single, result.batch, result.batch_to_single)
        numbers = (f"{result.num_parameters:,}", f"{result.largest_action:.2f}")
        table.add_row(case.name, *numbers, *(f"{difference:.1e}" for difference in differences))
        worst = max(worst, result.worst)
    Console(width=140).print(table)
    print(f"largest of all: {worst:.1e}, limit {MAX_DIFFERENCE:.0e}")
    sys.exit(worst >= MAX_DIFFERENCE)


if __name__ == "__main__":
    main()
