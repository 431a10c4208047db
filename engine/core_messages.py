"""Messages between the HTTP front (`AsyncEngine`) and the engine core, as msgpack.

Every message that carries a `call_id` is answered by one `Answer` or `Refusal` with the same id. A
submitted request is answered when the engine has accepted it; its chunks follow.
"""

from __future__ import annotations

import msgspec

from dayshift.engine.action_api import ActionRequest, PolicyInfo
from dayshift.engine.api import GenerateChunk, GenerateRequest, OnMatch, SessionConfig, TurnRequest
from dayshift.engine.startup import StartupTimes


class CoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front must know of the loaded model."""

    model_folder: str
    max_context_tokens: int  # prompt and output of one request together
    startup: StartupTimes
    policies: tuple[PolicyInfo, ...] = ()


class SubmitGenerate(msgspec.Struct, frozen=True, tag=True):
    """Start a stateless request."""

    call_id: int
    request: GenerateRequest


class SubmitTurn(msgspec.Struct, frozen=True, tag=True):
    """Start the next turn of a session."""

    call_id: int
    request: TurnRequest


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody wants this request's output any more. Not answered."""

    request_id: str


class SubmitActions(msgspec.Struct, frozen=True, tag=True):
    """Compute an action chunk. Answered with the ActionChunk, once it is there."""

    call_id: int
    request: ActionRequest


class CancelActions(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for the answer to this SubmitActions any more. Not answered."""

    call_id: int


class OpenSession(msgspec.Struct, frozen=True, tag=True):
    """Answered with SessionInfo."""

    call_id: int
    config: SessionConfig


class GetSession(msgspec.Struct, frozen=True, tag=True):
    """Answered with SessionInfo."""

    call_id: int
    session_id: str


class ListSessions(msgspec.Struct, frozen=True, tag=True):
    """Answered with a list of SessionInfo."""

    call_id: int


class ForkSession(msgspec.Struct, frozen=True, tag=True):
    """Answered with the new session's SessionInfo."""

    call_id: int
    session_id: str
    new_id: str | None


class ParkSession(msgspec.Struct, frozen=True, tag=True):
    """Answered with SessionInfo."""

    call_id: int
    session_id: str


class PrefetchSession(msgspec.Struct, frozen=True, tag=True):
    """Answered with SessionInfo."""

    call_id: int
    session_id: str


class CloseSession(msgspec.Struct, frozen=True, tag=True):
    """Delete a session and its file. Answered with None."""

    call_id: int
    session_id: str


class SetTriggers(msgspec.Struct, frozen=True, tag=True):
    """Replace a session's recall triggers. Answered with SessionInfo."""

    call_id: int
    session_id: str
    triggers: tuple[OnMatch, ...]


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Release every session, take no more work. Answered with None, before it is done."""

    call_id: int


class GetStats(msgspec.Struct, frozen=True, tag=True):
    """Answered with the engine's statistics: numbers by name."""

    call_id: int


class GetTrace(msgspec.Struct, frozen=True, tag=True):
    """Answered with an EngineTrace: what happened to requests since a cursor."""

    call_id: int
    cursor: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Close the engine and end."""


Call = (
    SubmitGenerate
    | SubmitTurn
    | SubmitActions
    | OpenSession
    | GetSession
    | ListSessions
    | ForkSession
    | ParkSession
    | PrefetchSession
    | CloseSession
    | SetTriggers
    | Drain
    | GetStats
    | GetTrace
)
ToCore = Call | Cancel | CancelActions | Shutdown


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded; the core's first message."""

    info: CoreInfo


class Answer(msgspec.Struct, frozen=True, tag=True):
    """A call succeeded; `result` is msgpack of the type that the call promises."""

    call_id: int
    result: msgspec.Raw


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """A call failed; see `wire.error_code`."""

    call_id: int
    code: str
    message: str


class Chunks(msgspec.Struct, frozen=True, tag=True):
    """What one engine step brought forth."""

    chunks: list[GenerateChunk]


class Died(msgspec.Struct, frozen=True, tag=True):
    """The core ends: a mistake in its configuration, or a defect."""

    message: str
    is_user_error: bool


FromCore = Ready | Answer | Refusal | Chunks | Died
