"""Errors as OpenAI's clients expect them; never a traceback."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from dayshift.engine.api import EngineError, InvalidRequestError
from dayshift.engine.wire import (
    ModelNotFoundError,
    RequestTimeoutError,
    RequestTooLargeError,
    error_code,
)

logger = logging.getLogger(__name__)

# The engine's own refusals begin with the field that they are about.
_FIELD = re.compile(r"([a-z_]+): ")
_ABSENT = object()


class ParameterError(InvalidRequestError):
    """A request is wrong in one field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class UnsupportedEndpointError(InvalidRequestError):
    """An endpoint of OpenAI's API that is not served."""


class ObjectNotFoundError(EngineError):
    """No response or conversation has this id."""

    status = 404


def error_body(error: EngineError) -> dict[str, Any]:
    """The JSON body for an error."""
    param = None
    if isinstance(error, ParameterError):
        param = error.param
    elif isinstance(error, ModelNotFoundError):
        param = "model"
    elif isinstance(error, InvalidRequestError) and (field := _FIELD.match(str(error))):
        param = field[1]
    code = "not_found" if isinstance(error, ObjectNotFoundError) else error_code(error)
    return _body(str(error), error.status, code, param)


def error_response(error: EngineError) -> JSONResponse:
    """The HTTP response for an error."""
    return JSONResponse(error_body(error), error.status)


def install_error_handlers(app: Starlette) -> None:
    """Make every error of the app an OpenAI-shaped body."""
    app.add_exception_handler(EngineError, _on_engine_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_defect)


def _body(message: str, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    special = {401: "authentication_error", 429: "rate_limit_error"}
    kind = special.get(status, "invalid_request_error" if status < 500 else "server_error")
    line = " ".join(message.splitlines())  # an id that it quotes may hold anything
    return {"error": {"message": line, "type": kind, "param": param, "code": code}}


async def _on_engine_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, EngineError)
    return error_response(error)


async def _on_validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return error_response(_parameter_error(error.errors(), error.body))


def _parameter_error(errors: Sequence[Any], body: Any) -> EngineError:
    first = errors[0]
    location = _path(first["loc"][1:], body)
    if first["type"] == "json_invalid":
        return InvalidRequestError(f"the body is not valid JSON: {first['ctx']['error']}")
    message = first["msg"].removeprefix("Value error, ")
    if not location:
        if first["type"] == "value_error":
            return InvalidRequestError(message)
        return InvalidRequestError("a JSON object is expected as body, with content-type application/json")
    if first["type"] == "extra_forbidden":
        message = "this field is not supported"
    elif first["type"] == "tuple_type":
        message = "Input should be a valid list"
    elif first["type"] == "too_short" and first["input"] == "":
        message = "must not be empty"
    elif first["type"] in ("too_long", "too_short"):
        message = _length_message(**first["ctx"])
    return ParameterError(".".join(location), message)


def _length_message(
    *, actual_length: int | None, min_length: int = 0, max_length: int | None = None, **_: Any
) -> str:
    """What is wrong with the number of members, in the words of JSON."""
    if max_length is None:
        return f"needs at least {min_length} item{'s' if min_length != 1 else ''}"
    if max_length == 0:
        return "only an empty list is supported"
    return f"at most {max_length} items are allowed, found {actual_length or 'more'}"


def _path(location: Sequence[str | int], body: Any) -> list[str]:
    """Where in the body an error is. pydantic also names the members of unions that it has tried."""
    path: list[str] = []
    for part in location:
        inner = _member(body, part)
        if inner is not _ABSENT:
            body = inner
            path.append(str(part))
        elif part is location[-1] and _may_miss(body, part):
            path.append(str(part))
    return path


def _may_miss(value: Any, part: str | int) -> bool:
    """Whether `part` names something that is missing in a value, and not a kind of error."""
    if isinstance(value, dict):
        return "[" not in str(part)  # "[key]", "literal['none','auto']"
    return isinstance(value, list) and isinstance(part, int)


def _member(value: Any, part: str | int) -> Any:
    if isinstance(value, dict):
        return value.get(part, _ABSENT)
    if isinstance(value, list) and isinstance(part, int) and part < len(value):
        return value[part]
    return _ABSENT


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code in (404, 405):
        message = f"there is no endpoint {request.method} {request.url.path}; /openapi.json lists all"
    code = {
        404: "not_found",
        405: "method_not_allowed",
        408: error_code(RequestTimeoutError()),
        413: error_code(RequestTooLargeError()),
    }
    body = _body(message, error.status_code, code.get(error.status_code, "invalid_request"))
    return JSONResponse(body, error.status_code, headers=error.headers)


async def _on_defect(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(EngineError("internal error, see the server's log"))
