"""The answers to a page's questions about a run. Everything runs in the run's own thread."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from dayshift.dataset_export.tables import ExchangeRow
from dayshift.types import DayshiftError
from dayshift.webui import protocol as ask
from dayshift.webui.library import OpenRun
from dayshift.webui.records import AttemptRecord
from dayshift.webui.run_index import LogEntry, RunIndex
from dayshift.webui.words import describe_attempt, describe_exchange, describe_hours

MAX_LINES = 500
MAX_TALK = 200


async def answer(run: OpenRun, question: ask.Question) -> Any:
    """What a question about a run asks for, as JSON-able values. Raises DayshiftError."""
    match question:
        case ask.AskBars():
            return await run.call(_bars, run.index, question)
        case ask.AskLanes():
            return await run.call(_lanes, run.index, question, run.now())
        case ask.AskSeries():
            return await run.call(_series, run.index, question)
        case ask.AskLog():
            return await run.call(_log, run.index, question)
        case ask.AskLogPlace():
            return await run.call(_log_place, run.index, question.t)
        case ask.AskTalk():
            return await run.call(_talk, run.index, question)
        case ask.AskTurns():
            return await run.call(_turns, run.index, question)
        case ask.AskJump():
            return await run.call(_jump, run.index, question)
        case ask.AskFrame():
            robot = run.index.robot(question.robot)
            return await run.call(run.pictures.neighbour, robot, question.t, question.delta)
        case ask.AskSessionsAt():
            return await run.call(_sessions, run.index, question.t)
        case ask.AskAttempt():
            return await run.call(_attempt, run, question.attempt_id)
    raise DayshiftError(f"cannot answer {type(question).__name__}")


def describe(run: OpenRun) -> dict[str, Any]:
    """What a page must know of a run to show it; the answer to `Open`."""
    row = run.index.run
    return {
        "run": run.name,
        "run_id": row.run_id,
        "name": row.name,
        "created_at": row.created_at,
        "fps": row.fps,
        "config_yaml": row.config_yaml,
        "git_revision": row.git_revision,
        "versions": row.versions,
        "end_s": run.index.end_s,
        "now_s": run.now(),
        "is_live": run.live.is_live,
        "engine_url": run.live.hello.engine_url if run.live.hello else None,
        "robots": [
            {
                "robot": robot.robot,
                "kind": robot.kind,
                "policy": robot.policy,
                "model": robot.planner_model,
                "memory": robot.planner_memory,
            }
            for robot in run.index.robot_rows
        ],
        "series": run.index.series.names,
        "num_lines": run.index.num_lines,
    }


def _bars(index: RunIndex, question: ask.AskBars) -> dict[str, Any]:
    """Attempts and reviews of each robot."""
    return {
        name: {
            "attempts": index.bars(name).window(question.from_s, question.to_s, question.width),
            "reviews": [
                [one.start_s, one.end_s]
                for one in index.robot(name).hours
                if one.is_review
                and one.start_s <= question.to_s
                and (one.end_s is None or one.end_s >= question.from_s)
            ],
        }
        for name in question.robots
    }


def _lanes(index: RunIndex, question: ask.AskLanes, now_s: float) -> dict[str, Any]:
    return index.requests.window(
        question.from_s,
        question.to_s,
        question.width,
        robot=question.robot,
        now_s=now_s,
        exchanges={row.robot: index.robot(row.robot).exchanges for row in index.robot_rows},
    )


def _sessions(index: RunIndex, t: float) -> list[dict[str, Any]]:
    index.sessions.refresh()
    if not index.sessions.has_any:
        raise DayshiftError("this run has no record of the engine's sessions")
    return [msgspec.to_builtins(state) for state in index.sessions.at(t)]


def _series(index: RunIndex, question: ask.AskSeries) -> dict[str, Any]:
    found = {}
    for name in question.names:
        if name in index.series.names:
            t, low, high = index.series.window(name, question.from_s, question.to_s, question.width)
            found[name] = [values.round(3).tolist() for values in (t, low, high)]
    return found


def _log(index: RunIndex, question: ask.AskLog) -> dict[str, Any]:
    first = max(0, question.first)
    entries = index.log[first : first + min(question.count, MAX_LINES)]
    texts = _texts(index, entries)
    lines = [[round(entry.t, 3), entry.robot, *_line(index, entry, texts)] for entry in entries]
    return {"first": first, "num_lines": len(index.log), "lines": lines}


def _texts(index: RunIndex, entries: list[LogEntry]) -> dict[str, dict[int, tuple[str, str]]]:
    """Message and reply of the exchanges among these lines, read together."""
    wanted: dict[str, list[int]] = defaultdict(list)
    for entry in entries:
        if entry.kind == "exchange":
            wanted[entry.robot].append(index.robot(entry.robot).exchanges[entry.ref].idx)
    return {robot: index.records.texts(robot, indices) for robot, indices in wanted.items()}


def _line(
    index: RunIndex, entry: LogEntry, texts: dict[str, dict[int, tuple[str, str]]]
) -> tuple[str, str, Any]:
    """(kind, text, what a click leads to): kind is an outcome, "planner", "recall", "problem" or "hours"."""
    robot = index.robot(entry.robot)
    match entry.kind:
        case "attempt":
            attempt = robot.attempts[entry.ref]
            return attempt.outcome, describe_attempt(attempt), attempt.attempt_id
        case "exchange":
            exchange = robot.exchanges[entry.ref]
            message, reply = texts[entry.robot].get(exchange.idx, ("", ""))
            kind = "problem" if exchange.has_problem else "recall" if exchange.num_recalled else "planner"
            return kind, describe_exchange(exchange, message, reply), exchange.idx
        case _:
            hours = robot.hours[entry.ref]
            return "hours", describe_hours(hours, is_end=entry.kind == "hours_end"), None


def _log_place(index: RunIndex, t: float) -> dict[str, int]:
    line = bisect.bisect_right(index.log, t, key=lambda entry: entry.t) - 1
    return {"line": line, "num_lines": len(index.log)}


def _talk(index: RunIndex, question: ask.AskTalk) -> dict[str, Any]:
    robot = index.robot(question.robot)
    place = bisect.bisect_right(robot.exchanges, question.t, key=lambda one: one.at)
    half = min(question.count, MAX_TALK) // 2
    around = robot.exchanges[max(0, place - half) : place + half]
    if not around:
        return {"exchanges": [], "has_earlier": False, "has_later": False}
    first, last = around[0].idx, around[-1].idx
    rows = index.records.talk(question.robot, first, last)
    return {
        "exchanges": [describe_talk(row, robot.exchange_of_turn) for row in rows],
        "has_earlier": first > robot.exchanges[0].idx,
        "has_later": last < robot.exchanges[-1].idx,
    }


def _turns(index: RunIndex, question: ask.AskTurns) -> list[dict[str, Any]]:
    robot = index.robot(question.robot)
    rows = index.records.talk_of(question.robot, question.indices[:MAX_TALK])
    return [describe_talk(row, robot.exchange_of_turn) for row in rows]


def describe_talk(row: ExchangeRow, exchange_of_turn: Callable[[int], int | None]) -> dict[str, Any]:
    """An exchange with its texts; recalled turns as the exchanges that they were."""
    return {
        "idx": row.idx,
        "at": row.at,
        "latency_s": row.latency_s,
        "shift": row.shift,
        "job": row.job,
        "step": row.step,
        "is_review": row.is_review,
        "is_repair": row.is_repair,
        "message": row.message,
        "reply": row.reply,
        "finish_reason": row.finish_reason,
        "ledger": row.ledger,
        "recall_range": None if row.recall_start_s is None else [row.recall_start_s, row.recall_end_s],
        "recalled": [exchange_of_turn(turn) for turn in row.recalled_turns],
        "present": [exchange_of_turn(turn) for turn in row.present_turns],
        "not_fitting": [exchange_of_turn(turn) for turn in row.not_fitting_turns],
        "problem": row.problem,
        "error": row.error,
    }


def _jump(index: RunIndex, question: ask.AskJump) -> dict[str, Any] | None:
    try:
        jumps = index.jumps(question.kind)
    except KeyError:
        raise DayshiftError(f"jump to {question.kind!r}: allowed are failure, review, recall") from None
    if question.robot:
        jumps = [jump for jump in jumps if jump.robot == question.robot]
    margin_s = 0.05  # the moment that the page stands at is not the next one
    if question.is_forward:
        place = bisect.bisect_right(jumps, question.t + margin_s, key=lambda jump: jump.t)
    else:
        place = bisect.bisect_left(jumps, question.t - margin_s, key=lambda jump: jump.t) - 1
    return jumps[place]._asdict() if 0 <= place < len(jumps) else None


def _attempt(run: OpenRun, attempt_id: str) -> dict[str, Any]:
    """An attempt, what was simulated, and the exchanges that led to it and followed from it."""
    attempt = run.index.attempts.get(attempt_id)
    if attempt is None:
        raise DayshiftError(f"{attempt_id}: no such attempt in this run")
    recording = run.index.records.recording(attempt_id)
    robot = run.index.robot(attempt.robot)
    around = _exchanges_of_step(run.index, attempt)
    rows = run.index.records.talk(attempt.robot, around[0], around[-1]) if around else []
    siblings = [one for one in robot.attempts if one.key[:3] == attempt.key[:3]]
    step = next((one for one in robot.steps if one.key == attempt.key), None)
    return {
        **attempt._asdict(),
        "state": step.state if step else None,
        "reason": step.reason if step else None,
        "siblings": [[one.attempt_id, one.number, one.outcome, one.is_review] for one in siblings],
        "frame_times": run.pictures.frame_times(attempt_id).tolist(),
        "fault": recording.fault if recording else None,
        "init_state_id": recording.init_state_id if recording else None,
        "seed": recording.seed if recording else None,
        "num_images": recording.num_images if recording else {},
        "talk": [
            describe_talk(row, robot.exchange_of_turn)
            for row in rows
            if (row.job, row.step) == (attempt.job, attempt.step)
        ],
    }


def _exchanges_of_step(index: RunIndex, attempt: AttemptRecord) -> list[int]:
    return [
        one.idx
        for one in index.robot(attempt.robot).exchanges
        if (one.shift, one.job, one.step, one.is_review) == attempt.key
    ]
