"""Prometheus metrics: requests and tokens as they pass, and the engine's own numbers on demand."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dayshift.engine.api import TokenLedger

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SOURCES = ("computed", "recomputed", "reused", "restored", "recalled", "generated")


class Metrics:
    """One registry per server, so that several servers fit into one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine_gauges: dict[str, Gauge] = {}
        self._responses = Counter(
            "dayshift_http_responses", "HTTP responses", ["route", "status"], registry=self._registry
        )
        self._generations = Counter(
            "dayshift_generations", "Generations by end", ["reason"], registry=self._registry
        )
        self._tokens = Counter(
            "dayshift_tokens", "Tokens by source, as in the ledger", ["source"], registry=self._registry
        )
        self._first_token = Histogram(
            "dayshift_time_to_first_token_seconds",
            "From accepted request to first token",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._duration = Histogram(
            "dayshift_generation_seconds",
            "From accepted request to last token",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def count_response(self, route: str, status: int) -> None:
        """An HTTP response was sent."""
        self._responses.labels(route, str(status)).inc()

    def observe_first_token(self, seconds: float) -> None:
        """The first token of a generation came after `seconds`."""
        self._first_token.observe(seconds)

    def observe_end(self, reason: str, seconds: float, ledger: TokenLedger) -> None:
        """A generation ended after `seconds`."""
        self._generations.labels(reason).inc()
        self._duration.observe(seconds)
        for source in _TOKEN_SOURCES:
            self._tokens.labels(source).inc(getattr(ledger, source))

    def render(self, engine_stats: Mapping[str, int]) -> bytes:
        """The text format, with the engine's numbers of now as gauges."""
        for name, value in engine_stats.items():
            if name not in self._engine_gauges:
                self._engine_gauges[name] = Gauge(
                    f"dayshift_engine_{name}", f"EngineStats.{name}", registry=self._registry
                )
            self._engine_gauges[name].set(value)
        return generate_latest(self._registry)
