"""What the page's subscribers are told beside the planner's own events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dayshift.sim.types import Camera
from dayshift.types import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRendered(Event):
    """A robot's cameras were rendered live for control step `index`; images as in `sim.types.Frame`."""

    kind = "frame_rendered"
    attempt_id: str
    index: int
    images: Mapping[Camera, NDArray[np.uint8]]
