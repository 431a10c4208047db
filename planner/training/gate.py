"""The gate of the default planner model: unseen operations, played through our engine.

    python -m dayshift.planner.training.gate --model planner/weights

Every operation is a session of its own with recall as keys and values; many are in flight at once.
`--processes` shares the operations among engines: a small model leaves a GPU idle for most of a step.
On one GPU that needs NVIDIA's multi-process service (`nvidia-cuda-mps-control -d`); without it, processes
take turns of milliseconds, and one is faster than several.
The operation's script is followed whatever the model answers: a wrong reply stays in the session and
may spoil what comes after it. Passed: actions at least 99.5 %, review lists (order and sentences
included) at least 99 % in each case but the one with held-out wording, which is for the report.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from multiprocessing import get_context
from pathlib import Path
from queue import Empty, Queue
from random import Random
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import (
    FinishReason,
    GenerateChunk,
    Message,
    RecallRange,
    SamplingParams,
    SessionConfig,
    TurnRequest,
)
from dayshift.planner import protocol
from dayshift.planner.rules import Rules
from dayshift.planner.training.operations import Operation, OperationShape, Turn, TurnKind, make_operation
from dayshift.planner.training.wording import Wording, held_out_sentence, libero_sentence
from dayshift.types import DayshiftError

MIN_ACTIONS, MIN_REVIEWS = 0.995, 0.99
_NUM_REVIEWS = 4
_MIN_SHIFT_TOKENS = 230  # a shift of 2 jobs x 3 steps that goes without a failure
_HOST_KV_BYTES = 1 << 28  # of each process; the default would be most of a machine's memory
_SEED = 20_000_000_003  # far from every seed of the training


@dataclass(frozen=True, slots=True)
class GateCase:
    """One row of the table. `has_left`: each reviewed shift has left the window, else it is in it."""

    name: str
    window: int
    has_left: bool
    wording: Wording = libero_sentence
    is_required: bool = True

    @property
    def shape(self) -> OperationShape:
        """Operations of 2 jobs x 3 steps a shift; unreviewed shifts push the reviewed ones out."""
        num_fillers = -(-self.window // _MIN_SHIFT_TOKENS) if self.has_left else 0
        return OperationShape(
            num_shifts=_NUM_REVIEWS + num_fillers,
            num_jobs=2,
            num_steps=3,
            num_reviews=_NUM_REVIEWS,
            wording=self.wording,
        )


CASES = (
    GateCase("window 768", 768, True),
    GateCase("window 2,048", 2_048, True),
    GateCase("window 8,192", 8_192, True),
    GateCase("window 8,192, shift still in it", 8_192, False),
    GateCase("window 2,048, held-out wording", 2_048, True, held_out_sentence, is_required=False),
)


@dataclass(slots=True)
class CaseScore:
    """Replies right and asked for, and where the reviewed shifts' turns were."""

    case: GateCase
    num_actions: int = 0
    num_actions_right: int = 0
    num_reviews: int = 0
    num_reviews_right: int = 0
    places: Counter[str] = field(default_factory=Counter)  # of reviews: recalled, present, both, incomplete
    wrong: list[dict[str, str]] = field(default_factory=list)

    def add(self, turn: Turn, reply: str, last: GenerateChunk) -> None:
        """Count one reply."""
        is_right = _understood(turn, reply) == _understood(turn, turn.reply)
        if turn.kind is TurnKind.REVIEW:
            self.num_reviews += 1
            self.num_reviews_right += is_right
            self.places[_place(last)] += 1
        else:
            self.num_actions += 1
            self.num_actions_right += is_right
        if not is_right:
            self.wrong.append({"message": turn.user, "expected": turn.reply, "reply": reply})

    def plus(self, other: CaseScore) -> CaseScore:
        """The score of both, which played different operations of one case."""
        return CaseScore(
            self.case,
            self.num_actions + other.num_actions,
            self.num_actions_right + other.num_actions_right,
            self.num_reviews + other.num_reviews,
            self.num_reviews_right + other.num_reviews_right,
            self.places + other.places,
            self.wrong + other.wrong,
        )

    @property
    def has_passed(self) -> bool:
        """Both shares reach the gate, and the reviews were of the kind that the case is about."""
        place = "recalled" if self.case.has_left else "present"
        return (
            self.num_actions_right >= MIN_ACTIONS * self.num_actions
            and self.num_reviews_right >= MIN_REVIEWS * self.num_reviews
            and self.places[place] == self.num_reviews
        )

    @classmethod
    def from_json(cls, case: GateCase, values: dict[str, Any]) -> CaseScore:
        """What `to_json` wrote."""
        (num_actions_right, num_actions), (num_reviews_right, num_reviews) = (
            values["actions"],
            values["reviews"],
        )
        return cls(
            case,
            num_actions,
            num_actions_right,
            num_reviews,
            num_reviews_right,
            Counter(values["reviewed_turns_were"]),
            values["wrong"],
        )

    def to_json(self) -> dict[str, object]:
        """The counts, and the first replies that were wrong."""
        return {
            "case": self.case.name,
            "window": self.case.window,
            "actions": [self.num_actions_right, self.num_actions],
            "reviews": [self.num_reviews_right, self.num_reviews],
            "reviewed_turns_were": dict(self.places),
            "has_passed": self.has_passed,
            "wrong": self.wrong[:20],
        }


def _understood(turn: Turn, reply: str) -> protocol.Command | protocol.Redo | None:
    try:
        return protocol.parse_review(reply) if turn.kind is TurnKind.REVIEW else protocol.parse_command(reply)
    except protocol.ReplyError:
        return None


def _place(last: GenerateChunk) -> str:
    if last.not_fitting_turns:
        return "incomplete"
    if last.recalled_turns and last.present_turns:
        return "both"
    return "present" if last.present_turns else "recalled"


class Player:
    """Plays one operation: a session, one turn in flight at a time."""

    def __init__(self, engine: Engine, case: GateCase, number: int) -> None:
        self._engine, self.number, self.score = engine, number, CaseScore(case)
        self.session_id = f"gate-{number}"
        self.request_id = ""  # of the turn in flight
        self._operation: Operation = make_operation(Random(_SEED + number), case.shape)
        self._turns: Iterator[tuple[int, Turn]] = iter(enumerate(self._operation.turns))
        self._turn: Turn | None = None
        self._reply = ""
        engine.open_session(
            SessionConfig(
                session_id=self.session_id,
                system=protocol.SYSTEM_PROMPTS["compact"],
                window=case.window,
            )
        )

    def submit_next(self) -> bool:
        """Put the next turn in; False when the operation is over (its session is closed)."""
        index, self._turn = next(self._turns, (0, None))
        self._reply = ""
        if self._turn is None:
            self._engine.close_session(self.session_id)
            return False
        self.request_id = f"{self.session_id} turn {index}"
        is_review, rules = self._turn.kind is TurnKind.REVIEW, Rules()
        hours = self._operation.hours[self._turn.shift] if is_review else None
        self._engine.submit(
            TurnRequest(
                request_id=self.request_id,
                session_id=self.session_id,
                at=float(index),
                messages=(Message("user", self._turn.user),),
                sampling=SamplingParams(
                    max_tokens=rules.max_review_tokens if is_review else rules.max_command_tokens,
                    json_schema=protocol.REVIEW_SCHEMA if is_review else protocol.COMMAND_SCHEMA,
                ),
                recall_range=None if hours is None else RecallRange(float(hours[0]), float(hours[1])),
            )
        )
        return True

    def take(self, chunk: GenerateChunk) -> bool:
        """Take a chunk of the turn in flight; True when the turn has ended."""
        self._reply += chunk.text
        if chunk.finish_reason is None:
            return False
        if chunk.finish_reason is FinishReason.ERROR:
            raise DayshiftError(f"session {self.session_id}: {chunk.error}")
        assert self._turn is not None
        self.score.add(self._turn, self._reply, chunk)
        return True


def run_case(
    engine: Engine, case: GateCase, operations: Iterable[int], *, num_at_once: int
) -> Iterator[tuple[int, CaseScore]]:
    """Play the operations of these numbers, `num_at_once` sessions at a time; each one's score as it ends."""
    numbers = iter(operations)
    players: dict[str, Player] = {}

    def start_next() -> None:
        if (number := next(numbers, None)) is not None:
            player = Player(engine, case, number)
            player.submit_next()
            players[player.request_id] = player

    for _ in range(num_at_once):
        start_next()
    while engine.has_work:
        for chunk in engine.step():
            player = players[chunk.request_id]
            if not player.take(chunk):
                continue
            del players[chunk.request_id]
            if player.submit_next():
                players[player.request_id] = player
            else:
                yield player.number, player.score
                start_next()


class GateRecords:
    """The score of every operation played, in memory and, with a path, as a line of JSON in a file.

    What the file holds already is not played again: a gate that was stopped goes on where it was.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._scores: dict[tuple[str, int], CaseScore] = {}
        if path is not None and path.exists():
            cases = {case.name: case for case in CASES}
            for line in path.read_text(encoding="utf-8").splitlines():
                values = json.loads(line)
                score = CaseScore.from_json(cases[values["case"]], values)
                self._scores[score.case.name, values["operation"]] = score

    def missing(self, case: GateCase, num_operations: int) -> list[int]:
        """Numbers of the case's operations that have no score yet."""
        return [number for number in range(num_operations) if (case.name, number) not in self._scores]

    def add(self, number: int, score: CaseScore) -> None:
        """Keep an operation's score."""
        self._scores[score.case.name, number] = score
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"operation": number, **score.to_json()}) + "\n")

    def total(self, case: GateCase, num_operations: int) -> CaseScore:
        """The score of the case's first operations together."""
        scores = (self._scores[case.name, number] for number in range(num_operations))
        return reduce(CaseScore.plus, scores, CaseScore(case))


def play_share(
    config: EngineConfig, work: Sequence[tuple[GateCase, Sequence[int]]], ended: Queue[tuple[int, CaseScore]]
) -> None:
    """One process's share: an engine of its own that plays these operations."""
    engine = Engine(config)
    try:
        for case, operations in work:
            for result in run_case(engine, case, operations, num_at_once=config.max_num_seqs):
                ended.put(result)
    finally:
        engine.close()


def play_missing(
    config: EngineConfig,
    cases: Sequence[GateCase],
    records: GateRecords,
    *,
    num_operations: int,
    num_processes: int,
) -> None:
    """Play what `records` lacks of the cases' operations, shared among processes."""
    missing = [(case, records.missing(case, num_operations)) for case in cases]
    context = get_context("spawn")  # CUDA does not survive a fork
    with (
        Progress(console=Console(stderr=True), transient=True) as progress,
        context.Manager() as manager,
        ProcessPoolExecutor(num_processes, mp_context=context) as pool,
    ):
        bar = progress.add_task("operations", total=sum(len(numbers) for _, numbers in missing))
        ended: Queue[tuple[int, CaseScore]] = manager.Queue()  # type: ignore[assignment]
        shares = [
            pool.submit(
                play_share,
                config,
                [(case, numbers[first::num_processes]) for case, numbers in missing],
                ended,
            )
            for first in range(num_processes)
        ]
        while not (all(share.done() for share in shares) and ended.empty()):
            with suppress(Empty):
                records.add(*ended.get(timeout=1))
                progress.advance(bar)
        for share in shares:
            share.result()  # raises what stopped it


def main(
    model: Annotated[Path, typer.Option(help="The model folder.")],
    operations: Annotated[int, typer.Option(help="Unseen operations per case.")] = 200,
    at_once: Annotated[int, typer.Option(help="Sessions of a process at a time.")] = 100,
    processes: Annotated[int, typer.Option(min=1, help="Engines that share the operations.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    kv_gib: Annotated[
        float | None, typer.Option(help="GiB of a process's KV pool; default as the engine's.")
    ] = None,
    only: Annotated[str, typer.Option(help="Only the case of this name.")] = "",
    records: Annotated[
        Path | None, typer.Option(help="Keep each operation's score in this file, and go on from it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
) -> None:
    """Measure a planner model; exit code 1 when it does not pass."""
    config = EngineConfig(
        model=str(model),
        device=device,  # type: ignore[arg-type]
        dtype=dtype,  # type: ignore[arg-type]
        max_num_seqs=at_once,
        kv_cache_bytes=None if kv_gib is None else int(kv_gib * 2**30),
        host_kv_bytes=_HOST_KV_BYTES,
    )
    cases = [case for case in CASES if only in (case.name, "")]
    if not cases:
        names = ", ".join(f'"{case.name}"' for case in CASES)
        raise typer.BadParameter(f"{only} is no case; allowed: {names}", param_hint="--only")
    table = Table(
        "case", "actions", "reviews", "reviewed turns were", "passed", title=f"{operations} operations"
    )
    play_missing(
        config, cases, gate := GateRecords(records), num_operations=operations, num_processes=processes
    )
    scores = [gate.total(case, operations) for case in cases]
    for score in scores:
        table.add_row(
            score.case.name,
            _share(score.num_actions_right, score.num_actions),
            _share(score.num_reviews_right, score.num_reviews),
            ", ".join(f"{number} {place}" for place, number in score.places.items()),
            "yes" if score.has_passed else "NO",
        )
    Console(stderr=True).print(table)
    has_passed = all(score.has_passed for score in scores if score.case.is_required)
    text = json.dumps({"has_passed": has_passed, "cases": [score.to_json() for score in scores]}, indent=1)
    typer.echo(text)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    raise typer.Exit(0 if has_passed else 1)


def _share(right: int, total: int) -> str:
    return f"{right}/{total} ({right / total:.2%})" if total else "none"


if __name__ == "__main__":
    typer.run(main)
