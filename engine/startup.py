"""How long an engine took to start, and with what."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["import", "weights", "compile", "graphs", "host", "measure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupTimes:
    """Seconds from the engine's beginning until it served, and the parts of them that grow with a model.

    import: the process and its libraries · weights: building the model and reading its weights ·
    compile: the kernels that graphs launch, from Triton's cache where they are in it · graphs: capturing
    CUDA graphs · host: pinning memory for KV outside the GPU · measure: what restoring a session costs.
    """

    total_s: float
    import_s: float = 0.0
    weights_s: float = 0.0
    compile_s: float = 0.0
    graphs_s: float = 0.0
    host_s: float = 0.0
    measure_s: float = 0.0
    num_compiled: int = 0  # kernels
    num_graphs: int = 0

    def __str__(self) -> str:
        parts = (self.import_s, self.weights_s, self.compile_s, self.graphs_s, self.host_s, self.measure_s)
        return (
            f"{self.total_s:.1f} s: import {self.import_s:.1f}, weights {self.weights_s:.1f}, "
            f"compile {self.compile_s:.1f} ({self.num_compiled} kernels), "
            f"graphs {self.graphs_s:.1f} ({self.num_graphs}), host KV {self.host_s:.1f}, "
            f"measuring {self.measure_s:.1f}, other {self.total_s - sum(parts):.1f}"
        )


@dataclass(slots=True)
class StartupClock:
    """Takes the times of one start. `began_at` is of `time.monotonic`, which all processes share."""

    began_at: float = field(default_factory=time.monotonic)
    num_compiled: int = 0
    num_graphs: int = 0
    _seconds: dict[Phase, float] = field(default_factory=dict)

    @contextmanager
    def running(self) -> Iterator[None]:
        """In this context, of this thread, `phase` counts for this start."""
        token = _clock.set(self)
        try:
            yield
        finally:
            _clock.reset(token)

    def add(self, phase: Phase, seconds: float) -> None:
        """Count so much for a phase."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def imported(self) -> None:
        """All until now was importing."""
        self._seconds["import"] = time.monotonic() - self.began_at

    def times(self) -> StartupTimes:
        """Until now."""
        return StartupTimes(
            total_s=time.monotonic() - self.began_at,
            import_s=self._seconds.get("import", 0.0),
            weights_s=self._seconds.get("weights", 0.0),
            compile_s=self._seconds.get("compile", 0.0),
            graphs_s=self._seconds.get("graphs", 0.0),
            host_s=self._seconds.get("host", 0.0),
            measure_s=self._seconds.get("measure", 0.0),
            num_compiled=self.num_compiled,
            num_graphs=self.num_graphs,
        )


_clock: ContextVar[StartupClock | None] = ContextVar("_clock", default=None)


@contextmanager
def phase(name: Phase) -> Iterator[StartupClock]:
    """What runs in this context belongs to the phase of the start that is under way, if one is."""
    clock = _clock.get() or StartupClock()
    began_at = time.monotonic()
    try:
        yield clock
    finally:
        clock.add(name, time.monotonic() - began_at)
