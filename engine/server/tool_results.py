"""What tools returned belongs to the calls that the model made, as in OpenAI's API: the rest is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dayshift.engine.api import Message
from dayshift.engine.server.errors import ParameterError


def check_chat(messages: Sequence[Message]) -> None:
    """A message with calls is followed by the result of each of them, and results stand nowhere else.

    Raises ParameterError.
    """
    calls: set[str] = set()  # of the last message that was no result
    open_ids: set[str] = set()
    for place, message in enumerate(messages):
        if message.role != "tool":
            _check_all_answered(place, open_ids)
            calls = {call.call_id for call in message.tool_calls}
            open_ids = set(calls)
            continue
        if not calls:
            raise ParameterError(
                f"messages.{place}.role",
                'messages with role "tool" must be a response to a preceding message with tool_calls',
            )
        if message.tool_call_id not in open_ids:
            raise ParameterError(f"messages.{place}.tool_call_id", _not_open(message.tool_call_id, calls))
        open_ids.discard(message.tool_call_id)
    _check_all_answered(len(messages), open_ids)


def _not_open(call_id: str | None, calls: set[str]) -> str:
    if call_id is None:
        return "a tool's message must name the call that it is a response to"
    if call_id in calls:
        return f"{call_id!r} has a response already"
    return f"{call_id!r} not found in tool_calls of the previous message"


def _check_all_answered(place: int, open_ids: set[str]) -> None:
    if open_ids:
        raise ParameterError(
            f"messages.{place - 1}",
            "a message with tool_calls must be followed by tool messages responding to each tool_call_id; "
            f"these did not have response messages: {', '.join(sorted(open_ids))}",
        )


def check_input(messages: Iterable[Message], *, open_ids: Iterable[str], may_lack: bool) -> None:
    """Every output has a call before it, and every call an output. `open_ids` are calls of what came before;
    with `may_lack`, these need no output.

    Raises ParameterError.
    """
    before = tuple(open_ids)
    unanswered = check_outputs(messages, open_ids=before, field="input")
    if missing := [call_id for call_id in unanswered if not (may_lack and call_id in before)]:
        raise ParameterError("input", f"no tool output found for function call {', '.join(missing)}")


def check_outputs(messages: Iterable[Message], *, open_ids: Iterable[str] = (), field: str) -> list[str]:
    """Every output has a call before it; the calls that have no output yet. Raises ParameterError."""
    unanswered = dict.fromkeys(open_ids)
    for message in messages:
        unanswered |= dict.fromkeys(call.call_id for call in message.tool_calls)
        if message.role != "tool":
            continue
        if message.tool_call_id not in unanswered:
            raise ParameterError(
                field, f"no tool call found for function call output with call_id {message.tool_call_id}"
            )
        del unanswered[message.tool_call_id]
    return list(unanswered)


def open_calls(messages: Iterable[Message]) -> list[str]:
    """The calls whose outputs are not among the messages."""
    found: dict[str, None] = {}
    for message in messages:
        found |= dict.fromkeys(call.call_id for call in message.tool_calls)
        if message.tool_call_id is not None:
            found.pop(message.tool_call_id, None)
    return list(found)
