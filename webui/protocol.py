"""What page and server say to each other over the one websocket.

From the page: JSON objects with a `type`. A question carries an `id`; its answer is a `Reply` with the
same one. A `Wish` says what the page wants to see; it is answered by binary pictures (only those that
the page does not show yet), `Changes` (if there are any) and one `Shown`, and only the newest wish
counts. The page sends its next wish after `Shown`: so a slow page asks, and gets, less often.

Binary picture: 16 bytes of header, little endian, then a JPEG.
    uint8 type (1) · uint8 camera (0 agentview, 1 wrist) · uint16 robot (its place in `Opened.robots`)
    · uint32 seek (the wish's) · float64 time on the run clock
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from dayshift.sim.types import CAMERAS, Camera
from dayshift.types import Outcome

PICTURE = 1
_HEADER = struct.Struct("<BBHId")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base of all messages from the page."""


# --- what the page wants to see ---------------------------------------------------------------


class Tile(msgspec.Struct, frozen=True, array_like=True):
    """A robot's cameras that are on the screen."""

    robot: str
    cameras: tuple[Camera, ...]


class Wish(Message, frozen=True, tag="wish"):
    """See the run at `t` seconds (None: now, and wait for news).

    `exact_robot`: show this robot's very control step, rendered where it was not recorded.

    `boards`: the robots whose shift boards are on the screen, with the revision that the page has.
    """

    seek: int
    t: float | None
    exact_robot: str | None = None
    tiles: tuple[Tile, ...] = ()
    boards: dict[str, int] = {}


# --- questions ---------------------------------------------------------------------------------


class Question(Message, frozen=True):
    """Base of all messages that are answered by a Reply."""

    id: int


class ListRuns(Question, frozen=True, tag="runs"):
    """All runs of the folder, and what this page may do."""


class Open(Question, frozen=True, tag="open"):
    """Look at a run from now on. Answered with `Opened`'s fields (see `queries.describe`)."""

    run: str


class Window(Question, frozen=True):
    """Base of questions about a stretch of time drawn `width` pixels wide."""

    from_s: float
    to_s: float
    width: int

    def __post_init__(self) -> None:
        if not self.from_s < self.to_s or not 1 <= self.width <= 10_000:
            raise ValueError("a window needs from_s < to_s and a width from 1 to 10000")


class AskBars(Window, frozen=True, tag="bars"):
    """The attempts of some robots."""

    robots: tuple[str, ...]


class AskLanes(Window, frozen=True, tag="lanes"):
    """The requests that robots made of the engine, in lanes that do not overlap; None: of all robots."""

    robot: str | None = None


class AskSeries(Window, frozen=True, tag="series"):
    """Some series of numbers, as minimum and maximum."""

    names: tuple[str, ...]


class AskLog(Question, frozen=True, tag="log"):
    """Lines of the log by number."""

    first: int
    count: int


class AskLogPlace(Question, frozen=True, tag="log_place"):
    """The number of the last line up to a time."""

    t: float


class AskTalk(Question, frozen=True, tag="talk"):
    """A robot's exchanges with its planner, around a time."""

    robot: str
    t: float
    count: int = 40


class AskTurns(Question, frozen=True, tag="turns"):
    """Some of a robot's exchanges by their numbers: the turns that a call recalled."""

    robot: str
    indices: tuple[int, ...]


class AskJump(Question, frozen=True, tag="jump"):
    """The next (or the one before) failure, review or recall."""

    kind: str
    t: float
    is_forward: bool = True
    robot: str | None = None


class AskFrame(Question, frozen=True, tag="frame"):
    """The time of the control step `delta` steps away."""

    robot: str
    t: float
    delta: int


class AskAttempt(Question, frozen=True, tag="attempt"):
    """All about one attempt."""

    attempt_id: str


# --- acts --------------------------------------------------------------------------------------


class Act(Question, frozen=True):
    """Base of what changes something; refused in read-only mode."""


class AskSchema(Question, frozen=True, tag="schema"):
    """The experiment's JSON Schema, and the experiments that come with Dayshift as YAML."""


class Check(Question, frozen=True, tag="check"):
    """Whether a YAML text is an experiment; answered with the problem, or with none."""

    yaml: str


class Start(Act, frozen=True, tag="start"):
    """Start an experiment. Answered with the run's name once it can be opened."""

    yaml: str


class Stop(Act, frozen=True, tag="stop"):
    """Stop the run in order; it can be resumed."""


class Resume(Act, frozen=True, tag="resume"):
    """Go on with a run that was stopped."""


class Export(Act, frozen=True, tag="export"):
    """Export the run's attempts as a LeRobot dataset beside the runs."""

    only: tuple[Outcome, ...] = (Outcome.DONE, Outcome.FAILED)


class MakeFilm(Act, frozen=True, tag="film"):
    """Make an MP4 of what the page shows."""

    speed: float = 60.0
    review_speed: float = 20.0
    robot: str | None = None


class AskTasks(Question, frozen=True, tag="tasks"):
    """What was started from pages and how far it is."""


class AskSessionsAt(Question, frozen=True, tag="sessions_at"):
    """The engine's sessions as they were recorded, at a time."""

    t: float


class AskSessions(Question, frozen=True, tag="sessions"):
    """The engine's sessions, while an engine runs."""


class AskSession(Question, frozen=True, tag="session"):
    """One session with its turns."""

    session_id: str


class AskPlanner(Act, frozen=True, tag="ask"):
    """Ask in a session. In a copy that is deleted again, unless `is_in_session`."""

    session_id: str
    text: str
    is_in_session: bool = False


class Park(Act, frozen=True, tag="park"):
    """Move a session out of the engine's memory; its next call restores it."""

    session_id: str


class Fork(Act, frozen=True, tag="fork"):
    """Copy a session."""

    session_id: str
    new_id: str


FromPage = (
    Wish
    | ListRuns
    | Open
    | AskBars
    | AskLanes
    | AskSeries
    | AskLog
    | AskLogPlace
    | AskTalk
    | AskTurns
    | AskJump
    | AskFrame
    | AskAttempt
    | AskSchema
    | Check
    | Start
    | Stop
    | Resume
    | Export
    | MakeFilm
    | AskTasks
    | AskSessionsAt
    | AskSessions
    | AskSession
    | AskPlanner
    | Park
    | Fork
)

decode = msgspec.json.Decoder(FromPage).decode


# --- to the page -------------------------------------------------------------------------------


class Reply(msgspec.Struct, frozen=True, tag_field="type", tag="reply", kw_only=True):
    """The answer to a question, or in one line why there is none."""

    id: int
    body: Any = None
    error: str | None = None


class Changes(msgspec.Struct, frozen=True, tag_field="type", tag="changes", kw_only=True):
    """Shift boards that are newer than the page's, what the robots are at, and which series there are."""

    boards: dict[str, Any]
    running: dict[str, Any]
    series: list[str]


class Shown(msgspec.Struct, frozen=True, tag_field="type", tag="shown", kw_only=True):
    """A wish is fulfilled: this is what all of the page's tiles show."""

    seek: int
    t: float
    now_s: float
    is_live: bool
    is_finished: bool  # nothing is left to be done; else the run can be gone on with
    revision: int
    totals: dict[str, int]
    tiles: dict[str, Any]  # robot -> attempt_id, index, num_frames, t, is_over


_encode = msgspec.json.encode


def encode(message: Reply | Changes | Shown) -> str:
    """JSON."""
    return _encode(message).decode()


def encode_picture(*, camera: Camera, robot: int, seek: int, t: float, jpeg: bytes) -> bytes:
    """A binary message."""
    return _HEADER.pack(PICTURE, CAMERAS.index(camera), robot, seek, t) + jpeg
