"""Shows a run while it goes on, on stderr: a live board on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dayshift.experiments.board import Board, RobotBoard
from dayshift.planner.jobs import AttemptEnded, ReviewEnded, ShiftEnded, ShiftStarted, StepEnded
from dayshift.types import Event, Outcome

MAX_ROBOTS_SHOWN = 12


class Progress(Protocol):
    """A display: use as a context manager, subscribe it to the run's events."""

    def __call__(self, event: Event, /) -> None: ...

    def note(self, text: str) -> None:
        """One line about the run as a whole, such as what is being started."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def make_progress(title: str, board: Board) -> Progress:
    """The live board on a terminal, plain lines elsewhere."""
    console = Console(stderr=True, highlight=False)
    return LiveProgress(title, board, console) if console.is_terminal else LineProgress(title, board, console)


class LineProgress:
    """One line per shift, step and review."""

    def __init__(self, title: str, board: Board, console: Console) -> None:
        self._board = board
        self._console = console
        self._lock = threading.Lock()
        self._prefix = f"[{title}] " if title else ""

    def __call__(self, event: Event, /) -> None:
        with self._lock:
            self._board.update(event)
            if line := describe(event):
                done = f"{self._board.num_steps_over}/{self._board.num_steps}"
                self._print(f"{event.t:7.1f} s  {event.robot}  {line}  ({done} steps)")

    def note(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(self._prefix + text, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class LiveProgress:
    """A board of all robots that is drawn again four times a second."""

    def __init__(self, title: str, board: Board, console: Console) -> None:
        self._title = title or "run"
        self._board = board
        self._note = ""
        self._lock = threading.Lock()
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)

    def __call__(self, event: Event, /) -> None:
        with self._lock:
            self._board.update(event)
            self._note = ""

    def note(self, text: str) -> None:
        self._note = text

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _render(self) -> Group:
        with self._lock:
            return Group(self._totals(), self._robots())

    def _totals(self) -> Table:
        board = self._board
        left = board.remaining_s
        row = Table.grid(padding=(0, 2))
        row.add_row(
            Text(self._title, style="bold"),
            ProgressBar(total=board.num_steps, completed=board.num_steps_over, width=24),
            f"{board.num_steps_over}/{board.num_steps} steps",
            f"{board.num_attempts} attempts",
            f"{board.num_calls} planner calls",
            _clock(board.elapsed_s),
            Text(self._note if left is None else f"about {_clock(left)} left", style="dim"),
        )
        return row

    def _robots(self) -> Table:
        table = Table.grid(padding=(0, 2))
        shown = list(self._board.robots.items())[:MAX_ROBOTS_SHOWN]
        for name, robot in shown:
            table.add_row(name, _marks(robot), _doing(robot))
        if len(self._board.robots) > len(shown):
            table.add_row(Text(f"and {len(self._board.robots) - len(shown)} more", style="dim"))
        return table


def describe(event: Event) -> str:
    """A line about an event, "" for one that is not worth a line."""
    match event:
        case ShiftStarted(is_review=False):
            return f"shift {event.shift} begins"
        case ShiftStarted():
            return f"review of shift {event.shift} begins"
        case AttemptEnded(result=result) if result.outcome is Outcome.INFRA:
            return f"step {event.attempt.step.key} broke: {result.detail}"
        case AttemptEnded(result=result):
            number, steps = event.attempt.number, result.num_control_steps
            return f"step {event.attempt.step.key} attempt {number} {result.outcome} ({steps} control steps)"
        case StepEnded(result=result) if result.outcome is Outcome.GIVEN_UP:
            return f"step {result.step.key} given up: {result.step.task}"
        case StepEnded(result=result):
            redone = " again" if result.is_review else ""
            return f"step {result.step.key} done{redone}: {result.step.task}"
        case ShiftEnded(report=report):
            return f"shift {report.shift} ends"
        case ReviewEnded(answer=answer) if not answer.is_valid:
            return f"review of shift {answer.shift} ends: no valid answer"
        case ReviewEnded(answer=answer):
            listed = ", ".join(str(key) for key in answer.steps) or "nothing"
            return f"review of shift {answer.shift} ends: planner listed {listed}"
        case _:
            return ""


def _marks(robot: RobotBoard) -> Text:
    """One mark per step, a bar between shifts."""
    marks = Text()
    for shift in robot.shifts:
        if shift.number > 1:
            marks.append("│", style="dim")
        for step in shift.steps:
            match robot.outcomes.get(step.key), robot.redo_outcomes.get(step.key):
                case None, _:
                    marks.append("·", style="dim")
                case Outcome.DONE, None:
                    marks.append("●", style="green")
                case _, Outcome.DONE:
                    marks.append("●", style="cyan")
                case _, None:
                    marks.append("✗", style="yellow")
                case _:
                    marks.append("✗", style="red")
    return marks


def _doing(robot: RobotBoard) -> Text:
    where = f"{'review of ' if robot.is_review else ''}shift {robot.shift}" if robot.shift else "waiting"
    if robot.attempt is None:
        return Text(f"{where}  asking the planner" if robot.shift else where, style="dim")
    attempt = robot.attempt
    return Text(f"{where}  {attempt.step.key} {attempt.step.task}, attempt {attempt.number}")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes}:{seconds:02d}"
