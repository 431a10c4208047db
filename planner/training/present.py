"""Does it help to repeat a shift that is still in the window? `python -m dayshift.planner.training.present`

Unseen operations, long enough that the context holds some 5,600 tokens when shift 1 is reviewed, all of
it still in the window. The same review is asked three times, each time in a fork of the same session:
as it is, and with the shift's turns put right before the question, as keys and values or as text.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import (
    GenerateChunk,
    Message,
    RecallMode,
    RecallPresent,
    RecallRange,
    SamplingParams,
    SessionConfig,
    TurnRequest,
)
from dayshift.planner import protocol
from dayshift.planner.rules import Rules
from dayshift.planner.training.operations import Operation, OperationShape, Turn, TurnKind, make_operation
from dayshift.planner.training.wording import libero_sentence

_SEED = 30_000_000_001  # far from every seed of the training, and of the gate
_WINDOW = 8_192
ARMS = {
    "plain": (RecallPresent.IGNORE, RecallMode.KV),
    "repeated as KV": (RecallPresent.REPEAT, RecallMode.KV),
    "repeated as text": (RecallPresent.REPEAT, RecallMode.TEXT),
}


def main(
    model: Annotated[Path, typer.Option(help="The model folder.")] = Path("planner/weights"),
    operations: Annotated[int, typer.Option(min=1, help="Unseen operations.")] = 10,
    shifts: Annotated[int, typer.Option(min=1, help="Shifts of 2 jobs x 3 steps before the review.")] = 20,
) -> None:
    """Print, as JSON, how many reviews each arm answered right, and how long the contexts were."""
    engine = Engine(EngineConfig(model=str(model), window=_WINDOW))
    num_right: Counter[str] = Counter()
    num_tokens: list[int] = []
    for number in range(operations):
        shape = OperationShape(
            num_shifts=shifts, num_jobs=2, num_steps=3, num_reviews=1, wording=libero_sentence
        )
        operation = make_operation(Random(_SEED + number), shape)
        session_id = _session_before_the_review(engine, operation)
        for arm in ARMS:
            reply, num_prompt_tokens = _ask(engine, session_id, operation, arm)
            num_right[arm] += reply == _review(operation)[1].reply
            if arm == "plain":
                num_tokens.append(num_prompt_tokens)
        engine.close_session(session_id)
    engine.close()
    result = {
        "operations": operations,
        "context_tokens": [min(num_tokens), max(num_tokens)],
        "reviews_right": {arm: num_right[arm] for arm in ARMS},
    }
    print(json.dumps(result, indent=1))


def _review(operation: Operation) -> tuple[int, Turn]:
    """The first review, and its place among the turns."""
    return next((i, turn) for i, turn in enumerate(operation.turns) if turn.kind is TurnKind.REVIEW)


def _session_before_the_review(engine: Engine, operation: Operation) -> str:
    index, _ = _review(operation)
    history = tuple(
        (float(at), (Message("user", turn.user), Message("assistant", turn.reply)))
        for at, turn in enumerate(operation.turns[:index])
    )
    config = SessionConfig(
        system=protocol.SYSTEM_PROMPTS["compact"], window=_WINDOW, low_water=1.0, history=history
    )
    return engine.open_session(config).session_id


def _ask(engine: Engine, session_id: str, operation: Operation, arm: str) -> tuple[str, int]:
    """The reply to the first review in a fork of the session, and the tokens of the prompt."""
    index, turn = _review(operation)
    branch = engine.fork_session(session_id).session_id
    present, mode = ARMS[arm]
    start_s, end_s = operation.hours[turn.shift]
    request = TurnRequest(
        request_id=branch,
        session_id=branch,
        at=float(index),
        messages=(Message("user", turn.user),),
        sampling=SamplingParams(max_tokens=Rules().max_review_tokens, json_schema=protocol.REVIEW_SCHEMA),
        recall_range=RecallRange(float(start_s), float(end_s)),
        recall_mode=mode,
        recall_present=present,
    )
    engine.submit(request)
    chunks: list[GenerateChunk] = []
    while engine.has_work:
        chunks += engine.step()
    engine.close_session(branch)
    return "".join(chunk.text for chunk in chunks), chunks[-1].num_prompt_tokens


if __name__ == "__main__":
    typer.run(main)
