"""Chat templates: messages in, prompt text out, rendered in Jinja's sandbox.

A stateless chat is rendered whole. A session appends only its new turn, so the text of a turn must
not depend on what came before it. `ChatTemplate` finds the parts that a session is put together from
and checks, once at load, that they add up to what the template itself renders:

    system_prefix + turn(user 1) + reply 1 + reply_end + turn(user 2) + reply 2 + reply_end + ...

A template that rewrites earlier turns fails this check; its model serves stateless requests only,
and `session_refusal` says why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox

from dayshift.engine.api import InvalidRequestError, Message, ToolCall
from dayshift.types import DayshiftError

# A short made-up conversation that stands before a turn while its text is found. The reply is a
# marker that no template can contain by itself.
_REPLY_MARK = "\u2063dayshift-reply\u2063"
_PAST = (Message("system", "s"), Message("user", "u"), Message("assistant", _REPLY_MARK))
_PROBE = Message("user", "probe")
_CALL = ToolCall("c", "probe", "{}")
_RESULT = Message("tool", "r", tool_call_id="c")
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "probe", "description": "p", "parameters": {"type": "object", "properties": {}}},
}


class ChatTemplate:
    """The chat template of one model.

    source: Jinja text · special_tokens: `bos_token` and the like, by name, as templates expect
    them. Raises DayshiftError when the source is not valid Jinja.
    """

    reply_end: str
    """What the template puts after an assistant's reply, such as `<|im_end|>` and a line break."""

    variables: frozenset[str]
    """Names that the template reads, such as `tools` and `enable_thinking`."""

    session_refusal: str | None
    """Why sessions are refused for this template; None if they work."""

    session_tools_refusal: str | None
    """Why sessions with tools are refused for it; None if they work."""

    def __init__(self, source: str, special_tokens: dict[str, str], *, origin: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise DayshiftError(f"{origin}: chat template, line {error.lineno}: {error.message}") from error
        self._special_tokens = special_tokens
        self.reply_end = ""
        self.session_refusal = None
        try:
            self.reply_end = self._after_mark(_PAST, add_generation_prompt=False)
            self._check_appendable()
        except _NotAppendableError as error:
            self.session_refusal = f"{origin}: {error}"
        except InvalidRequestError as error:
            self.session_refusal = f"{origin}: the chat template refuses a plain conversation: {error}"
        self.session_tools_refusal = self.session_refusal or self._find_tools_refusal(origin)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a whole conversation. Raises InvalidRequestError if the template refuses it.

        `tools` are described in the prompt, each as in OpenAI's API; `variables` are given to the template.
        """
        return self._render(messages, add_generation_prompt, tools, variables or {})

    def render_system(self, system: str | None, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The text before a session's first turn, for this system prompt (None: the template's own) and
        these tools. Raises InvalidRequestError for tools if it is not the place where they are described."""
        if tools and self.session_tools_refusal is not None:
            raise InvalidRequestError(f"tools: {self.session_tools_refusal}")
        return self._system_text(system, tools)

    def render_turn(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """The text of a new turn, to be appended to a session, generation prompt included. `variables` are
        given to the template."""
        rendered = self._after_mark((*_PAST, *messages), add_generation_prompt=True, variables=variables)
        return _without_prefix(rendered, self.reply_end, "the reply before a turn")

    def render_past_turn(self, messages: Sequence[Message]) -> str:
        """The text of a turn that is over, its replies included, as it stands when another follows."""
        rendered = self._after_mark((*_PAST, *messages, _PROBE), add_generation_prompt=True)
        rendered = _without_prefix(rendered, self.reply_end, "the reply before a turn")
        return _without_suffix(rendered, self.render_turn((_PROBE,)), "the turn after a turn")

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        try:
            return self._template.render(
                messages=[_template_message(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=list(tools) or None,
                **self._special_tokens,
                **(variables or {}),
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise InvalidRequestError(f"the chat template refuses these messages: {error}") from error

    def _system_text(self, system: str | None, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        messages = (_PROBE,) if system is None else (Message("system", system), _PROBE)
        turn = self.render_turn((_PROBE,))
        return _without_suffix(self._render(messages, True, tools), turn, "the first turn")

    def _after_mark(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        rendered = self._render(messages, add_generation_prompt, variables=variables)
        if rendered.count(_REPLY_MARK) != 1:
            raise _NotAppendableError("the chat template does not repeat a reply as it was given")
        return rendered.partition(_REPLY_MARK)[2]

    def _check_appendable(self) -> None:
        users = ("first", "  second\nquestion ", "third")
        replies = ('{"a":1}', "two\n\nlines")
        for system in ("be brief", None):
            messages = [] if system is None else [Message("system", system)]
            expected = self._system_text(system)
            for user, reply in zip(users, (*replies, None), strict=True):
                messages.append(Message("user", user))
                expected += self.render_turn(messages[-1:])
                if self._render(messages, True) != expected:
                    raise _NotAppendableError(
                        "the chat template rewrites earlier turns, so a new turn cannot be appended"
                    )
                if reply is not None:
                    messages.append(Message("assistant", reply))
                    expected += reply + self.reply_end

    def _find_tools_refusal(self, origin: str) -> str | None:
        """Tools have to be described in the system prompt, and what they return to be a turn to append."""
        if "tools" not in self.variables:
            return f"{origin}: the chat template has no tools"
        past = (Message("system", "s"), Message("user", "u"), Message("assistant", "", (_CALL,)))
        try:
            for system in ("s", None):
                if self._system_text(system, (_TOOL,)) == self._system_text(system):
                    return f"{origin}: the chat template does not describe tools in the system prompt"
            whole = self._render((*past, _RESULT), True, (_TOOL,))
            _without_suffix(whole, self.reply_end + self.render_turn((_RESULT,)), "what a tool returned")
        except InvalidRequestError as error:
            return f"{origin}: {error}"
        return None


def _template_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: a field that it lacks is not there."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        fields |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "type": "function",
                "id": call.call_id,
                "function": {"name": call.name, "arguments": _parsed(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _parsed(arguments: str) -> Any:
    """Templates write arguments out as JSON; those of a call that was cut short are text."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


class _NotAppendableError(InvalidRequestError):
    """The template does not render a conversation as the sum of its turns."""


def _without_prefix(text: str, prefix: str, what: str) -> str:
    if not text.startswith(prefix):
        raise _NotAppendableError(f"the chat template changes {what} when another message follows")
    return text[len(prefix) :]


def _without_suffix(text: str, suffix: str, what: str) -> str:
    if not text.endswith(suffix):
        raise _NotAppendableError(f"the chat template changes {what} with what stands before it")
    return text[: len(text) - len(suffix)]


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own tojson escapes <, > and & for HTML; prompts want plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
