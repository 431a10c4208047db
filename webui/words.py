"""The log's lines in words."""

from __future__ import annotations

from dayshift.planner.protocol import Execute, GiveUp, Next, ReplyError, parse_command, parse_review
from dayshift.types import Outcome
from dayshift.webui.records import AttemptRecord, ExchangeRecord, HoursRecord


def describe_attempt(attempt: AttemptRecord) -> str:
    """How an attempt ended."""
    step = f"{attempt.shift}.{attempt.job}.{attempt.step}"
    redo = "redo, " if attempt.is_review else ""
    if attempt.outcome == Outcome.INFRA:
        return f"step {step} {redo}attempt {attempt.number} broke: {attempt.detail}"
    seconds = attempt.end_s - attempt.start_s
    return (
        f"step {step} {redo}attempt {attempt.number} {attempt.outcome}: {attempt.task} "
        f"({attempt.num_control_steps} control steps, {seconds:.1f} s)"
    )


def describe_exchange(exchange: ExchangeRecord, message: str, reply: str) -> str:
    """A message to the planner, its reply, and where the tokens came from."""
    ledger = exchange.ledger
    parts = [
        f"{count} {name}"
        for name, count in (
            ("computed", ledger.computed),
            ("recomputed", ledger.recomputed),
            ("reused", ledger.reused),
            ("restored", ledger.restored),
            ("recalled", ledger.recalled),
            ("generated", ledger.generated),
        )
        if count
    ]
    tokens = f" [{', '.join(parts)}]" if parts else ""
    return f"{message} → {reply or 'no reply'}{tokens} ({exchange.latency_s * 1000:.0f} ms)"


def describe_reply(reply: str) -> tuple[str, str]:
    """A planner's reply as verb and object; ("", the reply) when it is no command of the protocol."""
    try:
        match parse_command(reply):
            case Execute(task):
                return "execute", task
            case Next():
                return "next", ""
            case GiveUp(key, task):
                return "give up", f"{key} {task}"
    except ReplyError:
        pass
    try:
        steps = parse_review(reply).steps
    except ReplyError:
        return "", reply
    return "redo", ", ".join(f"{job}.{step} {task}" for job, step, task in steps) or "nothing"


def describe_hours(hours: HoursRecord, *, is_end: bool) -> str:
    """A shift or a review begins or ends."""
    what = f"review of shift {hours.shift}" if hours.is_review else f"shift {hours.shift}"
    return f"{what} {'ends' if is_end else 'begins'}"
