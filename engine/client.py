"""The engine's HTTP client. No torch here: planner and experiments import it.

Errors are `EngineError`s: those that the server names come out as the same class as in the engine;
`EngineUnreachableError` and `EngineTimeoutError` say that there was no answer.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NoReturn, Self
from urllib.parse import quote

import httpx
import msgspec

from dayshift.engine.action_api import ActionBody, ActionChunk, PolicyInfo
from dayshift.engine.api import (
    EngineDrainingError,
    EngineError,
    FinishReason,
    GenerateChunk,
    GenerateResult,
    InvalidRequestError,
    Message,
    OnMatch,
    SamplingParams,
    SessionConfig,
    SessionInfo,
    TokenLedger,
    TurnRequest,
)
from dayshift.engine.wire import (
    EngineDiedError,
    EngineTimeoutError,
    EngineUnreachableError,
    ModelNotFoundError,
    RequestTooLargeError,
    UnauthorizedError,
    error_from_code,
)

__all__ = [
    "DayshiftClient",
    "EngineDiedError",
    "EngineTimeoutError",
    "EngineUnreachableError",
    "ModelNotFoundError",
    "RequestTooLargeError",
    "UnauthorizedError",
]

GREEDY = SamplingParams()
_CONNECT_TIMEOUT_S = 5.0


class DayshiftClient:
    """Calls of one server, over kept-alive connections. Thread-safe; close it, or use it as a context.

    `timeout_s` bounds the wait for a reply, or for the next piece of a streamed one. No call is sent
    twice by itself: after a timeout or a broken connection the server cancels it and rolls a turn back.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout_s: float = 120.0) -> None:
        self._url = base_url
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=base_url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S)),
            trust_env=False,  # a proxy of the environment must not stand between robots and their engine
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the connections go."""
        self._http.close()

    # --- sessions ------------------------------------------------------------------------------

    def open_session(self, config: SessionConfig) -> SessionInfo:
        """Create a session. Raises SessionExistsError, InvalidRequestError."""
        body = _without_defaults(config, SessionConfig())
        if config.history:
            body["history"] = [
                {"at": at, "messages": [_message_body(message) for message in messages]}
                for at, messages in config.history
            ]
        return self._session_info("POST", "/v1/sessions", body)

    def session(self, session_id: str) -> SessionInfo:
        """A session and its turns. Raises SessionNotFoundError."""
        return self._session_info("GET", _path(session_id))

    def sessions(self) -> list[SessionInfo]:
        """All sessions, parked ones included."""
        content = self._call("GET", "/v1/sessions").content
        return msgspec.json.decode(content, type=dict[str, list[SessionInfo]])["sessions"]

    def turn(self, request: TurnRequest) -> GenerateResult:
        """Take a session's next turn. Raises SessionNotFoundError, SessionBusyError, InvalidRequestError."""
        response = self._call("POST", f"{_path(request.session_id)}/turns", _turn_body(request))
        return msgspec.json.decode(response.content, type=GenerateResult)

    def stream_turn(self, request: TurnRequest) -> Generator[GenerateChunk]:
        """As `turn`, in pieces. Closing the generator before its end cancels the turn."""
        body = _turn_body(request) | {"stream": True}
        for event in self._stream(f"{_path(request.session_id)}/turns", body):
            yield msgspec.convert(event, GenerateChunk)

    def set_triggers(self, session_id: str, triggers: Sequence[OnMatch]) -> SessionInfo:
        """Replace a session's recall triggers."""
        body = {"triggers": [_plain(trigger) for trigger in triggers]}
        return self._session_info("PUT", f"{_path(session_id)}/triggers", body)

    def fork_session(self, session_id: str, new_id: str | None = None) -> SessionInfo:
        """A new session with the same past."""
        return self._session_info("POST", f"{_path(session_id)}/fork", {"session_id": new_id})

    def park_session(self, session_id: str) -> SessionInfo:
        """Give a session's KV blocks back; its next call restores it."""
        return self._session_info("POST", f"{_path(session_id)}/park")

    def prefetch_session(self, session_id: str) -> SessionInfo:
        """A hint that the session will be called soon: restores it if that takes no blocks from others."""
        return self._session_info("POST", f"{_path(session_id)}/prefetch")

    def close_session(self, session_id: str) -> None:
        """Delete a session and its records."""
        self._call("DELETE", _path(session_id))

    # --- stateless -----------------------------------------------------------------------------

    def generate(self, prompt: str | Sequence[int], sampling: SamplingParams = GREEDY) -> GenerateResult:
        """Continue a text or token ids (POST /v1/completions). Log probabilities need a session."""
        body = _openai_body(sampling) | {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
        reply = self._call("POST", "/v1/completions", body).json()
        return _openai_result(reply, reply["choices"][0]["text"])

    def chat(self, messages: Sequence[Message], sampling: SamplingParams = GREEDY) -> GenerateResult:
        """Answer a whole conversation (POST /v1/chat/completions). Log probabilities need a session."""
        body = _openai_body(sampling) | {"messages": [_message_body(message) for message in messages]}
        reply = self._call("POST", "/v1/chat/completions", body).json()
        return _openai_result(reply, reply["choices"][0]["message"]["content"])

    # --- policies ------------------------------------------------------------------------------

    def policies(self) -> list[PolicyInfo]:
        """The served policies."""
        content = self._call("GET", "/v1/policies").content
        return msgspec.json.decode(content, type=dict[str, list[PolicyInfo]])["policies"]

    def act(self, policy: str, body: ActionBody) -> ActionChunk:
        """Compute an action chunk. Raises PolicyNotFoundError, InvalidRequestError, DeadlineExceededError."""
        path = f"/v1/policies/{quote(policy, safe='')}/actions"
        response = self._call("POST", path, packed=msgspec.msgpack.encode(body))
        return msgspec.msgpack.decode(response.content, type=ActionChunk)

    def check_health(self) -> None:
        """Return if the engine works. Raises EngineDiedError if it has ended."""
        self._call("GET", "/health")

    # --- transport -----------------------------------------------------------------------------

    def _session_info(self, method: str, path: str, body: dict[str, Any] | None = None) -> SessionInfo:
        return msgspec.json.decode(self._call(method, path, body).content, type=SessionInfo)

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, packed: bytes | None = None
    ) -> httpx.Response:
        """One call with a body as JSON, or `packed` as msgpack."""
        headers = None if packed is None else {"Content-Type": "application/msgpack"}
        try:
            response = self._http.request(method, path, json=body, content=packed, headers=headers)
        except httpx.HTTPError as error:
            self._raise_no_answer(error)
        if response.is_error:
            raise _server_error(response)
        return response

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The data of each server-sent event."""
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.is_error:
                    response.read()
                    raise _server_error(response)
                for line in response.iter_lines():
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        return
                    if data:
                        event = json.loads(data)
                        if isinstance(event["error"], dict):
                            raise _error_from_body(event, response.status_code)
                        yield event
        except httpx.HTTPError as error:
            self._raise_no_answer(error)
        raise EngineUnreachableError(f"{self._url}: the connection ended before the reply did")

    def _raise_no_answer(self, error: httpx.HTTPError) -> NoReturn:
        if isinstance(error, httpx.ConnectTimeout | httpx.ConnectError):
            raise EngineUnreachableError(f"no engine answers at {self._url} ({error})") from error
        if isinstance(error, httpx.TimeoutException):
            raise EngineTimeoutError(f"{self._url} did not answer within {self._timeout_s:g} s") from error
        raise EngineUnreachableError(f"{self._url}: the connection broke ({error})") from error


def _path(session_id: str) -> str:
    if not session_id or "/" in session_id:
        raise InvalidRequestError(f"session id {session_id!r} is not allowed")
    return f"/v1/sessions/{session_id}"


def _server_error(response: httpx.Response) -> EngineError:
    try:
        return _error_from_body(response.json(), response.status_code)
    except ValueError:
        return EngineError(f"{response.url} answered {response.status_code}, and not as an engine does")


def _error_from_body(body: Any, status: int) -> EngineError:
    match body:
        case {"error": {"message": str(message), "code": code}}:
            return error_from_code(code, message)
        case {"status": "dead", "reason": str(reason)}:
            return EngineDiedError(reason)
        case {"status": "draining"}:
            return EngineDrainingError("the engine is draining")
        case _:
            return EngineError(f"the server answered {status}, and not as an engine does")


def _plain(value: Any) -> Any:
    """A border type as JSON holds it; a range is a pair there."""
    return {
        name: [item["start_s"], item["end_s"]] if isinstance(item, dict) and "start_s" in item else item
        for name, item in msgspec.to_builtins(value).items()
        if item is not None
    }


def _without_defaults(value: Any, defaults: Any) -> dict[str, Any]:
    plain, plain_defaults = _plain(value), _plain(defaults)
    return {name: item for name, item in plain.items() if plain_defaults.get(name) != item}


def _turn_body(request: TurnRequest) -> dict[str, Any]:
    body = _plain(request)
    del body["session_id"], body["sampling"]
    given = {name: item for name, item in body.items() if item != ()}
    if request.messages:
        given["messages"] = [_message_body(message) for message in request.messages]
    return given | _sampling_body(_without_defaults(request.sampling, GREEDY))


def _message_body(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.call_id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        body["reasoning_content"] = message.reasoning
    return body


def _sampling_body(fields: dict[str, Any]) -> dict[str, Any]:
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in fields["logit_bias"]}
    return fields


def _openai_body(sampling: SamplingParams) -> dict[str, Any]:
    body = _sampling_body(_without_defaults(sampling, SamplingParams(temperature=1.0, max_tokens=0)))
    if "logprobs" in body:
        raise InvalidRequestError("logprobs: this client returns them for session turns only")
    schema = body.pop("json_schema", None)
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
    return body | {"return_token_ids": True}


def _openai_result(reply: dict[str, Any], text: str) -> GenerateResult:
    choice, usage = reply["choices"][0], reply["usage"]
    return GenerateResult(
        request_id=reply["id"],
        text=text,
        token_ids=tuple(choice["token_ids"]),
        finish_reason=FinishReason(choice["finish_reason"]),
        ledger=msgspec.convert(usage["dayshift"], TokenLedger),
        num_prompt_tokens=usage["prompt_tokens"],
    )
