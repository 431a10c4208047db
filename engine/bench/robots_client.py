"""The robots of `dayshift bench robots`: asyncio clients over HTTP. No torch here."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from random import Random
from statistics import mean
from typing import Any, Protocol

import httpx

from dayshift.engine.bench.robots import RobotsLoad, RobotsRow, SourceShares
from dayshift.engine.bench.serving import Prompts, percentile
from dayshift.types import DayshiftError

_NUM_PREPARED_AT_ONCE = 16
_TIMEOUT_S = 300.0  # between two pieces of a reply
_LETTERS = "abcdefghijklmnopqrstuvwxyz     "
_TIERS = ("host", "archive")


@dataclass(slots=True, kw_only=True)
class Call:
    """One call: times in s; tokens of its context by source. `error` None: it was answered."""

    started_at: float
    first_token_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between two pieces of the reply
    total_s: float = 0.0
    num_prompt_tokens: int = 0
    num_computed: int = 0  # recomputed ones included
    num_recomputed: int = 0
    num_reused: int | None = None
    num_restored: int = 0
    error: str | None = None


class Robot(Protocol):
    """A client with a conversation of its own."""

    async def prepare(self) -> None:
        """Bring the history to where a server keeps it."""
        ...

    async def call(self) -> Call: ...

    async def is_right(self) -> bool:
        """Whether the server has what the robot took."""
        ...

    async def leave(self) -> None:
        """Let the server forget the history: it need not keep it when it is shut down."""
        ...


@dataclass(slots=True, kw_only=True)
class Server:
    """The server, and what all robots share."""

    http: httpx.AsyncClient
    load: RobotsLoad
    model: str | None  # of a peer
    tag: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    chars_per_token: float = 1.0  # of `_text`

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self.http.post(path, json=body)
        if response.is_error:
            raise DayshiftError(f"{path}: {response.status_code} {' '.join(response.text.split())[:300]}")
        return response.json()

    async def stream(self, path: str, body: dict[str, Any]) -> tuple[Call, list[dict[str, Any]]]:
        """One streamed call, and its events."""
        call, lines, last = Call(started_at=time.perf_counter()), [], 0.0
        try:
            async with self.http.stream("POST", path, json=body | {"stream": True}) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        since_start = time.perf_counter() - call.started_at
                        if lines:
                            call.gaps_s.append(since_start - last)
                        else:
                            call.first_token_s = since_start
                        last = since_start
                        lines.append(line)
                    elif response.is_error:
                        call.error = line[:300]
        except httpx.HTTPError as error:
            call.error = f"{type(error).__name__}: {error}"
        call.total_s = time.perf_counter() - call.started_at
        events = [json.loads(line[6:]) for line in lines]
        if not events and call.error is None:
            call.error = "no event came"
        return call, events


class SessionRobot:
    """Its history is in a session; it sends its new turn only."""

    def __init__(self, server: Server, index: int) -> None:
        self._server, self._random = server, Random(index)
        self._prompts = Prompts(server.load.vocab_size, seed=index)
        self._session_id = f"robot-{server.tag}-{index}"
        self._num_turns = self._num_tokens = 0

    async def prepare(self) -> None:
        load = self._server.load
        turn_tokens = load.new_tokens + load.generated_tokens
        chars = max(2, round(turn_tokens * self._server.chars_per_token))
        num_turns = max(1, _history_length(load, self._random) // turn_tokens)
        history = [
            {"at": float(at), "messages": _turn_messages(self._random, chars)} for at in range(num_turns)
        ]
        system = _text(Random(load.seed), round(load.system_tokens * self._server.chars_per_token))
        body = {"session_id": self._session_id, "system": system, "window": load.window, "history": history}
        info = await self._server.post("/v1/sessions", body)
        self._num_turns, self._num_tokens = num_turns, _num_turn_tokens(info)
        call = await self._call(num_generated=1)
        if call.error is not None:
            raise DayshiftError(f"{self._session_id}: its history could not be computed: {call.error}")

    async def call(self) -> Call:
        return await self._call(self._server.load.generated_tokens)

    async def _call(self, num_generated: int) -> Call:
        num_new = self._server.load.new_tokens
        body = {
            "token_ids": self._prompts.make(num_new),
            "at": float(self._num_turns),
            "max_tokens": num_generated,
            "temperature": 1.0,
            "ignore_eos": True,
        }
        call, events = await self._server.stream(f"/v1/sessions/{self._session_id}/turns", body)
        if call.error is not None:
            return call
        last = events[-1]
        if last.get("finish_reason") != "length":
            call.error = str(last.get("error"))[:300]
            return call
        ledger = last["ledger"]
        call.num_prompt_tokens = last["num_prompt_tokens"]
        call.num_computed = ledger["computed"] + ledger["recomputed"]
        call.num_recomputed, call.num_restored = ledger["recomputed"], ledger["restored"]
        call.num_reused = ledger["reused"]
        self._num_turns += 1
        self._num_tokens += num_new + num_generated
        return call

    async def is_right(self) -> bool:
        response = await self._server.http.get(f"/v1/sessions/{self._session_id}")
        info = response.json()
        found = (len(info.get("turns", ())), _num_turn_tokens(info) if response.is_success else -1)
        return found == (self._num_turns, self._num_tokens)

    async def leave(self) -> None:
        (await self._server.http.delete(f"/v1/sessions/{self._session_id}")).raise_for_status()


class HistoryRobot:
    """It sends its history as token ids, as a client of a server without sessions does."""

    def __init__(self, server: Server, index: int) -> None:
        load = server.load
        self._server, self._prompts = server, Prompts(load.vocab_size, seed=index)
        self._system_ids = Prompts(load.vocab_size, load.seed).make(load.system_tokens)
        turn_tokens = load.new_tokens + load.generated_tokens
        num_turns = max(1, _history_length(load, Random(index)) // turn_tokens)
        self._turns = [self._prompts.make(turn_tokens) for _ in range(num_turns)]

    async def prepare(self) -> None:
        """There is nowhere to bring it: the first call does."""

    async def call(self) -> Call:
        load = self._server.load
        new_ids = self._prompts.make(load.new_tokens)
        if load.cuts_history:
            self._cut(len(new_ids) + load.generated_tokens)
        token_ids = [*self._system_ids, *chain(*self._turns), *new_ids]
        body = {
            "model": self._server.model,
            "prompt": token_ids,
            "max_tokens": load.generated_tokens,
            "temperature": 1.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        call, events = await self._server.stream("/v1/completions", body)
        choices = [choice for event in events for choice in event.get("choices", ())]
        if call.error is None and not any(choice.get("finish_reason") == "length" for choice in choices):
            call.error = json.dumps(events[-1])[:300]
        if call.error is not None:
            return call
        usage = next((event["usage"] for event in reversed(events) if event.get("usage")), {})
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        call.num_prompt_tokens = len(token_ids)
        call.num_reused = cached
        call.num_computed = call.num_prompt_tokens - (cached or 0)
        call.num_recomputed = call.num_computed - load.new_tokens
        generated = [token_id for choice in choices for token_id in choice.get("token_ids") or ()]
        self._turns.append(new_ids + (generated or self._prompts.make(load.generated_tokens)))
        return call

    def _cut(self, num_new: int) -> None:
        """Let turns leave, if `num_new` tokens more would pass the window."""
        window = self._server.load.window
        num_tokens = len(self._system_ids) + sum(map(len, self._turns)) + num_new
        if num_tokens > window:
            while self._turns and num_tokens > window * 3 // 4:
                num_tokens -= len(self._turns.pop(0))

    async def is_right(self) -> bool:
        return True  # the robot itself keeps it

    async def leave(self) -> None:
        """A server without sessions has nothing to forget."""


def run_fleet(
    url: str,
    load: RobotsLoad,
    numbers: Sequence[int],
    peer_model: str | None,
    send: Callable[[RobotsRow | str], object],
) -> None:
    """Let fleets of these sizes call the server, one size after the other; `send` is given the rows."""
    try:
        asyncio.run(_run_fleet(url, load, numbers, peer_model, send))
    except httpx.TransportError as error:
        raise DayshiftError(f"{url}: {error or type(error).__name__}") from error


async def _run_fleet(
    url: str,
    load: RobotsLoad,
    numbers: Sequence[int],
    peer_model: str | None,
    send: Callable[[RobotsRow | str], object],
) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(_TIMEOUT_S)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout, trust_env=False) as http:
        server = Server(http=http, load=load, model=peer_model)
        make_robot = HistoryRobot if peer_model is not None else SessionRobot
        if peer_model is None:
            server.chars_per_token = await _chars_per_token(server)
        robots: list[Robot] = []
        for number in numbers:
            started = time.perf_counter()
            joining = [make_robot(server, index) for index in range(len(robots), number)]
            await _prepare(joining)
            robots += joining
            send(f"{number} robots: histories are there after {time.perf_counter() - started:.1f} s")
            send(await _measure(server, robots))
        for robot in robots:
            await robot.leave()


async def _prepare(robots: Sequence[Robot]) -> None:
    gate = asyncio.Semaphore(_NUM_PREPARED_AT_ONCE)

    async def prepare(robot: Robot) -> None:
        async with gate:
            await robot.prepare()

    async with asyncio.TaskGroup() as group:
        for robot in robots:
            group.create_task(prepare(robot))


async def _measure(server: Server, robots: Sequence[Robot]) -> RobotsRow:
    load, calls = server.load, []
    started = time.perf_counter()
    measured_from, end = started + load.duration_s / 3, started + load.duration_s

    async def operate(robot: Robot, random: Random) -> None:
        await asyncio.sleep(random.random() * load.think_s)
        while time.perf_counter() < end:
            calls.append(await robot.call())
            think_s = random.expovariate(1 / load.think_s)
            await asyncio.sleep(min(think_s, max(0.0, end - time.perf_counter())))

    async with asyncio.TaskGroup() as group:
        for index, robot in enumerate(robots):
            group.create_task(operate(robot, Random(f"{load.seed} {len(robots)} {index}")))
        await asyncio.sleep(load.duration_s / 3)
        before = await _tokens_by_tier(server)
    after = await _tokens_by_tier(server)
    loaded = {tier: after[tier] - before[tier] for tier in _TIERS}
    row = _row(len(robots), calls, measured_from, end, loaded)
    num_right = sum([await robot.is_right() for robot in robots])
    return dataclasses.replace(row, num_wrong_sessions=len(robots) - num_right)


def _row(
    num_robots: int, all_calls: Sequence[Call], measured_from: float, end: float, loaded: dict[str, float]
) -> RobotsRow:
    """Waits are those of the calls that began in the measured time, the rate that of the replies that ended
    in it: where waits are long, few calls do both."""
    calls = [call for call in all_calls if call.started_at >= measured_from]
    answered = [call for call in calls if call.error is None]
    if not answered:
        reason = calls[0].error if calls else f"no call began in {end - measured_from:.1f} s"
        raise DayshiftError(f"bench robots: no call was answered with {num_robots} robots: {reason}")
    gaps_s = [gap_s for call in answered for gap_s in call.gaps_s] or [0.0]
    ends = [call.started_at + call.total_s for call in all_calls if call.error is None]
    return RobotsRow(
        num_robots=num_robots,
        num_calls=len(answered),
        num_failures=len(calls) - len(answered),
        calls_per_s=sum(measured_from <= ended_at < end for ended_at in ends) / (end - measured_from),
        p50_s=percentile([call.total_s for call in answered], 50),
        p95_s=percentile([call.total_s for call in answered], 95),
        first_token_p50_s=percentile([call.first_token_s for call in answered], 50),
        first_token_p95_s=percentile([call.first_token_s for call in answered], 95),
        token_gap_p95_s=percentile(gaps_s, 95),
        token_gap_p99_s=percentile(gaps_s, 99),
        prompt_tokens=mean(call.num_prompt_tokens for call in answered),
        computed_tokens=mean(call.num_computed for call in answered),
        sources=_shares(answered, loaded),
    )


def _shares(calls: Sequence[Call], loaded: dict[str, float]) -> SourceShares | None:
    """`loaded`: tokens that the server read from each tier meanwhile."""
    if any(call.num_reused is None for call in calls):
        return None
    reused = sum(call.num_reused or 0 for call in calls)
    restored = sum(call.num_restored for call in calls)
    recomputed = sum(call.num_recomputed for call in calls)
    total = (reused + restored + recomputed) or 1
    from_disk = restored * loaded["archive"] / (sum(loaded.values()) or 1)
    return SourceShares(
        gpu=reused / total,
        host=(restored - from_disk) / total,
        disk=from_disk / total,
        recomputed=recomputed / total,
    )


async def _tokens_by_tier(server: Server) -> dict[str, float]:
    """Tokens whose KV the server has read from each tier so far; 0 from a peer."""
    if server.model is not None:
        return dict.fromkeys(_TIERS, 0.0)
    text = (await server.http.get("/metrics")).raise_for_status().text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {tier: float(values[f"dayshift_engine_num_tokens_from_{tier}"]) for tier in _TIERS}


async def _chars_per_token(server: Server) -> float:
    """How long a text has to be, to be a turn of a known number of tokens: tried out on a session."""
    load = server.load
    chars = load.new_tokens + load.generated_tokens
    body = {
        "session_id": f"robot-{server.tag}-probe",
        "history": [{"at": 0.0, "messages": _turn_messages(Random(load.seed), chars)}],
    }
    info = await server.post("/v1/sessions", body)
    await server.http.delete(f"/v1/sessions/{body['session_id']}")
    return chars / _num_turn_tokens(info)


def _num_turn_tokens(info: dict[str, Any]) -> int:
    return sum(turn["num_tokens"] for turn in info["turns"])


def _history_length(load: RobotsLoad, random: Random) -> int:
    return round(load.history_tokens * random.uniform(0.4, 1.6))


def _turn_messages(random: Random, num_chars: int) -> list[dict[str, str]]:
    num_reply = num_chars // 3
    return [
        {"role": "user", "content": _text(random, num_chars - num_reply)},
        {"role": "assistant", "content": _text(random, num_reply)},
    ]


def _text(random: Random, num_chars: int) -> str:
    return "".join(random.choices(_LETTERS, k=num_chars))
