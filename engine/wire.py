"""What the engine's processes, its HTTP server and its clients share. No torch here.

Errors cross a border as a code and one line of text, and come out as the same class.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from dayshift.engine.action_api import DeadlineExceededError, PolicyNotFoundError
from dayshift.engine.api import (
    ContextLengthExceededError,
    EngineDrainingError,
    EngineError,
    EngineOverloadedError,
    FinishReason,
    GenerateChunk,
    GenerateResult,
    InvalidRequestError,
    RequestIdInUseError,
    SessionBusyError,
    SessionExistsError,
    SessionLockedError,
    SessionNotFoundError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    TokenLedger,
)


class EngineDiedError(EngineError):
    """The engine core ended while it was needed."""

    status = 503


class ServerClosingError(EngineError):
    """The server is told to end, and the call was not over in time."""

    status = 503


class EngineUnreachableError(EngineError):
    """No server answers at this address, or the connection broke."""

    status = 503


class EngineTimeoutError(EngineError):
    """The server did not answer in time."""

    status = 504


class UnauthorizedError(EngineError):
    """The API key is missing or wrong."""

    status = 401


class ModelNotFoundError(EngineError):
    """The server does not serve this model."""

    status = 404


class RequestTooLargeError(EngineError):
    """The body of an HTTP request is larger than the server accepts."""

    status = 413


class RequestTimeoutError(EngineError):
    """The call took longer than the server lets one take, or its body did not arrive in time."""

    status = 408


class TooManyRequestsError(EngineError):
    """This API key has as many calls under way as one may have."""

    status = 429


class SlowReaderError(EngineError):
    """A streamed reply was read much slower than it was generated, and was cancelled."""

    status = 408


_BY_CODE = {
    re.sub(r"(?<!^)(?=[A-Z])", "_", error.__name__.removesuffix("Error")).lower(): error
    for error in (
        EngineError,
        InvalidRequestError,
        ContextLengthExceededError,
        RequestIdInUseError,
        SessionNotFoundError,
        SessionBusyError,
        SessionExistsError,
        SessionLockedError,
        StoreError,
        StoreFullError,
        StoreCorruptError,
        EngineOverloadedError,
        EngineDrainingError,
        EngineDiedError,
        ServerClosingError,
        EngineUnreachableError,
        EngineTimeoutError,
        UnauthorizedError,
        ModelNotFoundError,
        RequestTooLargeError,
        RequestTimeoutError,
        TooManyRequestsError,
        SlowReaderError,
        PolicyNotFoundError,
        DeadlineExceededError,
    )
}
_CODES = {error: code for code, error in _BY_CODE.items()}


def error_code(error: EngineError) -> str:
    """The error's name on the wire, such as `session_busy`."""
    return next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)


def error_from_code(code: str | None, message: str) -> EngineError:
    """The error that `error_code` named; a plain EngineError for a code that is not ours."""
    return _BY_CODE.get(code or "", EngineError)(message)


def failure_of(chunk: GenerateChunk) -> EngineError:
    """The error that a generation ended with."""
    kind = InvalidRequestError if chunk.is_request_wrong else EngineError
    kind = StoreFullError if chunk.is_store_full else kind
    return kind(chunk.error or "the generation failed")


def collect_chunks(chunks: Iterable[GenerateChunk]) -> GenerateResult:
    """Put the chunks of one finished request together.

    Raises EngineError when the generation ended with an error, or the last chunk is missing.
    """
    chunks = list(chunks)
    last = chunks[-1] if chunks else None
    if last is None or last.finish_reason is None:
        raise EngineError("the generation ended without a finish reason")
    if last.finish_reason is FinishReason.ERROR:
        raise failure_of(last)
    return GenerateResult(
        request_id=last.request_id,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        finish_reason=last.finish_reason,
        ledger=last.ledger or TokenLedger(),
        num_prompt_tokens=last.num_prompt_tokens,
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        recalled_turns=last.recalled_turns,
        kept_turns=last.kept_turns,
        present_turns=last.present_turns,
        not_fitting_turns=last.not_fitting_turns,
        is_repeated=last.is_repeated,
    )
