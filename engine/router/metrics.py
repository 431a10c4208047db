"""The router's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, generate_latest
from prometheus_client.registry import Collector

from dayshift.engine.router.fleet import EngineLink, EngineState, Fleet


class RouterMetrics:
    """One registry per router."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._totals: dict[str, Gauge] = {}
        self._responses = Counter(
            "dayshift_router_responses",
            "Responses by engine and status",
            ["engine", "status"],
            registry=self._registry,
        )
        self._untaken = Counter(
            "dayshift_router_untaken_calls",
            "Calls that an engine did not take, and that another was asked for",
            ["engine", "reason"],
            registry=self._registry,
        )
        self._lost = Counter(
            "dayshift_router_lost_replies",
            "Calls whose connection to the engine broke before the reply's end",
            ["engine"],
            registry=self._registry,
        )
        self._moved = Counter(
            "dayshift_router_moved_sessions",
            "Sessions that went on at another engine",
            registry=self._registry,
        )
        self._states = self._gauge("state", "1 for the state that the engine is in", "state")
        self._in_flight = self._gauge("requests_in_flight", "Requests of this router")
        self._sessions = self._gauge("sessions", "Sessions that the router knows to be there")

    def count_response(self, engine: EngineLink, status: int) -> None:
        """An engine's response was passed on."""
        self._responses.labels(engine.name, str(status)).inc()

    def count_untaken(self, engine: EngineLink, reason: str) -> None:
        """An engine did not take a call."""
        self._untaken.labels(engine.name, reason).inc()

    def count_lost(self, engine: EngineLink) -> None:
        """A reply, or a part of it, never came."""
        self._lost.labels(engine.name).inc()

    def count_moved(self) -> None:
        """A session went on at another engine."""
        self._moved.inc()

    def render(
        self, fleet: Fleet, engine_totals: Mapping[str, float], engine_counts: Sequence[Metric]
    ) -> bytes:
        """The text format, with the fleet as it is now, and the engines' numbers: gauges by name, and what
        they have counted."""
        for engine in fleet.engines:
            for state in EngineState:
                self._states.labels(engine.name, state).set(engine.state is state)
            self._in_flight.labels(engine.name).set(engine.num_in_flight)
            self._sessions.labels(engine.name).set(engine.num_sessions)
        for name, value in engine_totals.items():
            if name not in self._totals:
                self._totals[name] = Gauge(name, "Of all engines together", registry=self._registry)
            self._totals[name].set(value)
        return generate_latest(self._registry) + _text_of(engine_counts)

    def _gauge(self, name: str, description: str, *labels: str) -> Gauge:
        return Gauge(
            f"dayshift_router_engine_{name}", description, ["engine", *labels], registry=self._registry
        )


def _text_of(families: Sequence[Metric]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    """What others have collected."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)
