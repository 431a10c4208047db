"""Border types of the engine. No torch here: clients import this module.

Text, messages or token ids go in; `GenerateChunk`s and one `GenerateResult` with its `TokenLedger`
come out. All types are frozen; over HTTP and between the engine's processes they travel as JSON or
msgpack through msgspec, field names unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dayshift.types import DayshiftError


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # end-of-turn token, a stop string, or the grammar is complete
    LENGTH = "length"  # max_tokens reached
    CANCELLED = "cancelled"  # client went away or asked; a session turn is rolled back
    ERROR = "error"


class RecallMode(StrEnum):
    """How archived turns are put back."""

    KV = "kv"  # archived keys and values, positions renumbered: no prompt tokens computed
    TEXT = "text"  # archived token ids, prefilled again
    OFF = "off"


class RecallPresent(StrEnum):
    """What happens to turns of the asked range that are still in the window."""

    IGNORE = "ignore"
    REPEAT = "repeat"  # their text is put right before the question although it is present


class MatchKind(StrEnum):
    """How a trigger looks at a turn."""

    SUBSTRING = "substring"
    REGEX = "regex"
    SEMANTIC = "semantic"  # by the model's own keys


class TurnState(StrEnum):
    """Where a turn is. A turn is archived/recalled; its session is parked/restored."""

    WINDOW = "window"
    ARCHIVED = "archived"
    RECALLED = "recalled"  # archived, and at present also put back next to the window


class KVRecall(StrEnum):
    """What becomes of calls that ask for turns as KV; see `sessions.recall_gate`."""

    UNTRIED = "untried"  # the model is measured at the first such call
    ALLOWED = "allowed"
    AS_TEXT = "as_text"  # the model garbles recalled KV: turns are recalled as text instead
    REFUSED = "refused"  # the same, and such calls are refused


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. `temperature` 0 is greedy.

    `json_schema` is a JSON schema (as a dict) that the output must satisfy; `grammar` is a grammar in
    llguidance's dialect of Lark instead. At most one of the two.
    `logprobs` asks for the log probability of each chosen token and of that many alternatives.

    Before all else, per token: a positive logit is divided by `repetition_penalty`, a negative one
    multiplied, if the token is in the call's new tokens or in the output (Keskar et al.,
    arXiv:1909.05858); then `presence_penalty` is subtracted once and `frequency_penalty` for each
    time that it is in the output; then the token's `logit_bias` is added.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    skip_special_tokens: bool = True  # False: control tokens are part of the text, but for the last one


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model asked for. `arguments` is JSON, as the model wrote it."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. Roles as in the OpenAI API: system, user, assistant, tool.

    `reasoning` and `tool_calls` are of an assistant's message, `tool_call_id` of a tool's.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class RecallRange:
    """Half-open time range [start_s, end_s) on the session's clock (the `at` of its turns)."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OnMatch:
    """A recall trigger: when a turn's text matches `text`, the rule recalls turns.

    Exactly one of `range` (that time range), `last_n` (the n youngest archived turns, n >= 1) and
    `range_in_call` (the range sent with the call, which is then recalled on a match only) says which.

    A semantic rule has no text. It recalls the `similar_n` archived turns whose stored keys are most like
    the question's, as far as their score, a cosine, is `min_score` or more.
    """

    text: str = ""
    match: MatchKind = MatchKind.SUBSTRING
    range: RecallRange | None = None
    last_n: int | None = None
    range_in_call: bool = False
    similar_n: int | None = None
    min_score: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A stateless request: prompt token ids in, tokens out. Id chosen by the caller, unique."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    priority: int = 0  # higher goes first


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """The next turn of a session. Exactly one of `messages` and `token_ids` is set.

    `token_ids` are appended as they are and the model continues after them; `messages` are rendered
    through the chat template, generation prompt included. `at` is the turn's time in seconds on
    the session's clock.

    `retain_until` is a hint, in Unix time: until then the session is parked after those without it.

    A turn is taken once: submitted again with its `request_id`, as by a client that lost the answer, it
    is answered from the session's record, and nothing is computed. Another turn needs another id.
    """

    request_id: str
    session_id: str
    at: float
    messages: tuple[Message, ...] = ()
    token_ids: tuple[int, ...] = ()
    sampling: SamplingParams = SamplingParams()
    recall_range: RecallRange | None = None
    recall_mode: RecallMode = RecallMode.KV
    recall_present: RecallPresent = RecallPresent.IGNORE
    priority: int = 0
    retain_until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """What a session is created with.

    `window` is the number of tokens kept, system prompt included. At a turn boundary that would
    pass `window * high_water`, whole turns leave (recalled ones first, then oldest first) until at
    most `window * low_water` tokens remain. `recall_budget` is the largest number of recalled tokens
    held beside the window (default: as many as the window). `history` starts a session that is long
    already: (time, messages of one turn) in order, prefilled at the first call. `tools` are functions, each
    as in OpenAI's API, that the system prompt describes.
    """

    session_id: str | None = None  # default: a new id
    system: str | None = None
    window: int | None = None  # default: the engine's
    high_water: float = 1.0
    low_water: float = 0.75
    recall_budget: int | None = None
    history: tuple[tuple[float, tuple[Message, ...]], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLedger:
    """Where a call's context came from, in tokens; every prompt token is counted exactly once.

    computed: new prompt tokens prefilled (system prompt included when it is computed) ·
    recomputed: tokens prefilled again that had been computed before (refused or dearer restore,
    recall as text) · reused: already in the window · restored: read back from a parked session ·
    recalled: archived turns put back as KV in this call.
    """

    computed: int = 0
    recomputed: int = 0
    reused: int = 0
    restored: int = 0
    recalled: int = 0
    generated: int = 0
    restored_bytes: int = 0
    recalled_bytes: int = 0
    restore_ms: float = 0.0
    recall_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log probability of a chosen token, and of the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateChunk:
    """A piece of a running generation. `text` never ends inside a character.

    The last chunk of a request has `finish_reason` set and carries the ledger.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None  # set with FinishReason.ERROR: one line for the client
    is_request_wrong: bool = False  # with an error: the request was at fault, which only showed on the way
    is_store_full: bool = False  # with an error: the turn's record found no space
    ledger: TokenLedger | None = None
    num_prompt_tokens: int = 0  # in the last chunk
    recalled_turns: tuple[int, ...] = ()  # turns put back by this call
    kept_turns: tuple[int, ...] = ()  # asked for, and put back by an earlier call
    present_turns: tuple[int, ...] = ()  # asked for, and still in the window
    not_fitting_turns: tuple[int, ...] = ()  # asked for, beyond the recall budget
    is_repeated: bool = False  # the turn was taken before: its recorded reply, without log probabilities

    @classmethod
    def failed(cls, request_id: str, error: DayshiftError) -> GenerateChunk:
        """The end of a request that could not go on."""
        return cls(
            request_id=request_id,
            finish_reason=FinishReason.ERROR,
            error=error.for_client if isinstance(error, EngineError) else str(error),
            is_request_wrong=isinstance(error, InvalidRequestError),
            is_store_full=isinstance(error, StoreFullError),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """A finished generation, its chunks put together."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    ledger: TokenLedger
    num_prompt_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    recalled_turns: tuple[int, ...] = ()
    kept_turns: tuple[int, ...] = ()
    present_turns: tuple[int, ...] = ()
    not_fitting_turns: tuple[int, ...] = ()
    is_repeated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnInfo:
    """One turn of a session as `GET /v1/sessions/{id}` shows it."""

    index: int
    at: float
    num_tokens: int
    state: TurnState
    text: str
    request_id: str | None = None  # of the call that it came with; None if it came as history or by a fork


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """A session as `GET /v1/sessions/{id}` shows it."""

    session_id: str
    window: int
    is_parked: bool
    is_busy: bool
    num_system_tokens: int
    num_window_tokens: int  # tokens now in the context, system prompt included, recalled excluded
    num_recalled_tokens: int
    num_archived_tokens: int
    num_kv_blocks: int
    turns: tuple[TurnInfo, ...]
    triggers: tuple[OnMatch, ...] = ()
    kv_recall: KVRecall = KVRecall.UNTRIED  # of the engine's model
    num_recalls_switched: int = 0  # calls that asked for turns as KV and got them as text, since the start


class EngineError(DayshiftError):
    """Base of the engine's errors; each is one line for the client."""

    status = 500  # the HTTP status it maps to

    @property
    def for_client(self) -> str:
        """What a client may read, who may be anybody: nothing of the machine's own."""
        return str(self)


class InvalidRequestError(EngineError):
    """The request itself is wrong: too long to ever fit, an unknown field, a bad schema."""

    status = 400


class ContextLengthExceededError(InvalidRequestError):
    """Prompt and reply are longer than the model's context, or a turn than its session's window."""


class RequestIdInUseError(EngineError):
    """A request with this id is in flight. A client that lost its answer asks again when it has ended."""

    status = 409


class SessionNotFoundError(EngineError):
    """No session has this id."""

    status = 404


class SessionBusyError(EngineError):
    """A call of this session is in flight; one at a time."""

    status = 409


class SessionFileError(EngineError):
    """Something is wrong with a file of the session store. The message names it with its path, which clients
    are not told; there is none where the error has come from a server."""

    def __init__(self, reason: str, path: Path | None = None) -> None:
        super().__init__(reason if path is None else f"{path}: {reason}")
        self._path, self._reason = path, reason

    @property
    def for_client(self) -> str:
        """With the file's name, which is the session's, and not its place."""
        return self._reason if self._path is None else f"{self._path.name}: {self._reason}"


class SessionLockedError(SessionFileError):
    """The session's file is open already, in this engine or in another; the call was not taken."""

    status = 409


class SessionExistsError(EngineError):
    """A session with this id exists already."""

    status = 409


class StoreError(SessionFileError):
    """The session store cannot read or write a file."""


class StoreFullError(StoreError):
    """No space is left on the store's disk; the session is as it was before the call."""

    status = 507


class StoreCorruptError(StoreError):
    """A record of a session file is damaged, and it is not just the torn end of the file."""


class EngineOverloadedError(EngineError):
    """The waiting queue is full."""

    status = 503


class EngineDrainingError(EngineError):
    """The engine gives its sessions away and takes no more work; the call was not taken."""

    status = 503
