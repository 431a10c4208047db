"""Which policies the engine can be asked to serve. No torch here: it is loaded in the core's process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dayshift.engine.config import Device, DType
from dayshift.engine.servable import PolicySource, Servable, Sharing
from dayshift.policy.smolvla.config import load_policy_config
from dayshift.policy.smolvla.folders import find_checkpoint


def smolvla_source(
    name: str,
    checkpoint: str | Path,
    *,
    device: Device = "auto",
    dtype: DType = "auto",
    sharing: Sharing = "slices",
) -> PolicySource:
    """A SmolVLA checkpoint, a folder or a hub id, to be served as `name`.

    Its configuration is read at once: raises DayshiftError when there is no SmolVLA checkpoint.
    """
    folder = find_checkpoint(checkpoint)
    load_policy_config(folder)
    return PolicySource(name=name, load=_LoadSmolVLA(folder.resolve(), device, dtype, sharing))


@dataclass(frozen=True, slots=True)
class _LoadSmolVLA:
    """`PolicySource.load`; equal when it loads the same."""

    folder: Path
    device: Device
    dtype: DType
    sharing: Sharing

    def __call__(self, name: str) -> Servable:
        import torch

        from dayshift.policy.smolvla.policy import SmolVLAPolicy
        from dayshift.policy.smolvla.serving import ServedSmolVLA

        device, dtype = self.device, self.dtype
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if dtype == "auto":
            dtype = "bfloat16" if device == "cuda" else "float32"
        policy = SmolVLAPolicy.load(self.folder, device=device, dtype=getattr(torch, dtype))
        return ServedSmolVLA(name, policy, self.sharing)
