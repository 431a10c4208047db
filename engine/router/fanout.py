"""Calls that every engine answers, and their replies joined: sessions, policies, traces, and the gauges."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import httpx
import msgspec
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import Response

from dayshift.engine.router.call import Call
from dayshift.engine.router.fleet import EngineLink, EngineState, Fleet
from dayshift.engine.router.forwarder import NoEngineReadyError
from dayshift.engine.router.health import describe, mark

_GAUGE_PREFIX = "dayshift_engine_"
_SESSIONS = f"{_GAUGE_PREFIX}num_sessions"
_PARKED = f"{_GAUGE_PREFIX}num_parked_sessions"


async def list_sessions(call: Call, fleet: Fleet, transport: httpx.AsyncBaseTransport) -> Response:
    """The sessions of all engines that take work, each once.

    Every engine reads all sessions of a shared store; the one that has a session open knows best
    what it is doing. An engine's error is passed on. Raises NoEngineReadyError.
    """
    infos = await _joined_lists("sessions", call, fleet, transport)
    return infos if isinstance(infos, Response) else _json({"sessions": merged(infos)})


async def list_policies(call: Call, fleet: Fleet, transport: httpx.AsyncBaseTransport) -> Response:
    """The policies of all engines that take work, each once. Errors as `list_sessions`."""
    infos = await _joined_lists("policies", call, fleet, transport)
    if isinstance(infos, Response):
        return infos
    by_name = {info["name"]: info for info in reversed(infos)}
    return _json({"policies": [by_name[name] for name in sorted(by_name)]})


async def join_traces(call: Call, fleet: Fleet, transport: httpx.AsyncBaseTransport) -> Response:
    """The traces of all engines that take work; each finds its own part in the reader's cursor."""
    responses = await _ask_all(call, fleet, transport)
    traces = [
        trace
        for response in responses
        if response.is_success
        for trace in msgspec.json.decode(response.content)["traces"]
    ]
    return Response(msgspec.json.encode({"traces": traces}), media_type="application/json")


async def engine_metrics(
    call: Call, fleet: Fleet, transport: httpx.AsyncBaseTransport
) -> tuple[dict[str, float], list[Metric]]:
    """What the engines' /metrics say, all engines together: their own numbers now, and what was counted."""
    responses = await _ask_all(call, fleet, transport)
    texts = [response.text for response in responses if response.is_success]
    families = [family for text in texts for family in text_string_to_metric_families(text)]
    return totals([gauges_in(text) for text in texts]), summed(families)


def merged(infos: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """SessionInfos as JSON holds them, each session once, by id: as the engine that uses it says."""
    by_id: dict[str, dict[str, Any]] = {}
    for info in infos:
        known = by_id.setdefault(info["session_id"], info)
        if _liveness(info) > _liveness(known):
            by_id[info["session_id"]] = info
    return [by_id[session_id] for session_id in sorted(by_id)]


def gauges_in(text: str) -> dict[str, float]:
    """An engine's own numbers in Prometheus' text format."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {sample.name: sample.value for sample in samples if sample.name.startswith(_GAUGE_PREFIX)}


def summed(families: Iterable[Metric]) -> list[Metric]:
    """Counters and histograms of several engines as one of each name, every sample added up."""
    sums: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], float]]
    values = defaultdict(lambda: defaultdict(float))
    for family in families:
        if family.type not in ("counter", "histogram"):
            continue
        sums.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        for sample in family.samples:
            values[family.name][sample.name, frozenset(sample.labels.items())] += sample.value
    for family_name, family in sums.items():
        for (name, labels), value in values[family_name].items():
            family.add_sample(name, dict(labels), value)
    return list(sums.values())


def totals(gauges: list[dict[str, float]]) -> dict[str, float]:
    """Sums over engines. Sessions in the shared store, which every engine counts, are counted once."""
    sums: dict[str, float] = defaultdict(float)
    for engine_gauges in gauges:
        for name, value in engine_gauges.items():
            sums[name] += value
    if _SESSIONS in sums:
        num_in_pools = sums[_SESSIONS] - sums[_PARKED]
        sums[_SESSIONS] = max(engine_gauges[_SESSIONS] for engine_gauges in gauges)
        sums[_PARKED] = sums[_SESSIONS] - num_in_pools
    return dict(sums)


async def _joined_lists(
    key: str, call: Call, fleet: Fleet, transport: httpx.AsyncBaseTransport
) -> list[dict[str, Any]] | Response:
    """What every engine lists under `key`; an engine's error, to be passed on. Raises NoEngineReadyError."""
    responses = await _ask_all(call, fleet, transport)
    if not responses:
        raise NoEngineReadyError(fleet)
    for response in responses:
        if response.is_error:
            content_type = response.headers.get("content-type")
            return Response(response.content, response.status_code, media_type=content_type)
    return [info for response in responses for info in msgspec.json.decode(response.content)[key]]


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


async def _ask_all(call: Call, fleet: Fleet, transport: httpx.AsyncBaseTransport) -> list[httpx.Response]:
    """The replies of all engines that take work; one that does not answer is left out."""

    async def ask(engine: EngineLink) -> httpx.Response | None:
        try:
            response = await transport.handle_async_request(call.request_to(engine.url))
            await response.aread()
        except httpx.RequestError as error:
            mark(engine, EngineState.UNREACHABLE, describe(error))
            return None
        return response

    return [response for response in await asyncio.gather(*map(ask, fleet.ready)) if response is not None]


def _liveness(info: dict[str, Any]) -> tuple[bool, bool]:
    return info["is_busy"], not info["is_parked"]
