"""What drafts from a session's history, or a draft model, save and cost: `dayshift bench speculation`.

The same calls go to two engines, one of which drafts: round by round in turn, so that both see the same
machine. A round is a call of every session at once; its time is that from the first submission to the
last end, prompts included.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random
from typing import Any

from dayshift.engine.api import GenerateRequest, Message, SamplingParams, SessionConfig, TurnRequest
from dayshift.engine.config import EngineConfig
from dayshift.engine.engine import Engine

_NUM_PROMPT, _NUM_GENERATED = 64, 64  # of random text
_HOT = 100.0  # its temperature: any token may come
_MAX_REPLY = 256

Round = Sequence[GenerateRequest | TurnRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What one session is told, turn by turn, with the schema that the reply must satisfy."""

    system: str
    turns: Sequence[tuple[str, dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationRow:
    """One line of the table. Steps and seconds are those without drafts, and those with them."""

    workload: str
    num_at_once: int
    num_tokens: int
    num_steps: tuple[int, int]
    seconds: tuple[float, float]
    num_drafted: int
    num_accepted: int
    num_drafted_by_model: int  # of these, the draft model's
    num_accepted_of_model: int
    num_other_replies: int  # that were not the same with drafts: possible only where two tokens are as likely

    @property
    def speed_up(self) -> float:
        return self.seconds[0] / self.seconds[1]


def compare_speculation(
    config: EngineConfig,
    conversations: Sequence[Conversation],
    batch_sizes: Sequence[int],
    num_random_rounds: int = 12,
) -> Iterator[SpeculationRow]:
    """Two rows for each batch size: sessions that hold these conversations, and random text. One engine is
    `config`'s, the other is the same without drafts."""
    plain, drafting = Engine(replace(config, speculation="off", draft_model=None)), Engine(config)
    for size in batch_sizes:
        sessions = list(islice(cycle(conversations), size))
        for engine in (plain, drafting):
            for number, conversation in enumerate(sessions):
                engine.open_session(SessionConfig(session_id=f"{number}", system=conversation.system))
        yield _compare("conversations", size, plain, drafting, _turns(sessions))
        for engine in (plain, drafting):
            for number in range(size):
                engine.close_session(f"{number}")
        yield _compare("random text", size, plain, drafting, _random_text(plain, size, num_random_rounds))
    for engine in (plain, drafting):
        engine.close()


def _turns(sessions: Sequence[Conversation]) -> Iterator[Round]:
    for at in range(min(len(conversation.turns) for conversation in sessions)):
        turns = [conversation.turns[at] for conversation in sessions]
        yield [
            TurnRequest(
                request_id=f"{at}-{number}",
                session_id=f"{number}",
                at=float(at),
                messages=(Message("user", text),),
                sampling=SamplingParams(max_tokens=_MAX_REPLY, json_schema=schema),
            )
            for number, (text, schema) in enumerate(turns)
        ]


def _random_text(engine: Engine, size: int, num_rounds: int) -> Iterator[Round]:
    random, vocab_size = Random(size), engine.model_config.vocab_size
    for at in range(num_rounds):
        yield [
            GenerateRequest(
                request_id=f"{at}-{number}",
                prompt_token_ids=tuple(random.randrange(vocab_size) for _ in range(_NUM_PROMPT)),
                sampling=SamplingParams(
                    max_tokens=_NUM_GENERATED,
                    ignore_eos=True,
                    temperature=_HOT,
                    seed=at * size + number,
                ),
            )
            for number in range(size)
        ]


def _compare(
    workload: str, size: int, plain: Engine, drafting: Engine, rounds: Iterator[Round]
) -> SpeculationRow:
    engines = (plain, drafting)
    before = [engine.stats() for engine in engines]
    seconds, num_other, num_tokens = [0.0, 0.0], 0, 0
    for requests in rounds:
        replies: list[dict[str, list[int]]] = []
        for side, engine in enumerate(engines):
            began_at = time.perf_counter()
            replies.append(_answer(engine, requests))
            seconds[side] += time.perf_counter() - began_at
        num_tokens += sum(map(len, replies[0].values()))
        num_other += sum(replies[0][key] != replies[1][key] for key in replies[0])
    after = [engine.stats() for engine in engines]
    steps = [late.num_steps - early.num_steps for early, late in zip(before, after, strict=True)]
    return SpeculationRow(
        workload=workload,
        num_at_once=size,
        num_tokens=num_tokens,
        num_steps=(steps[0], steps[1]),
        seconds=(seconds[0], seconds[1]),
        num_drafted=after[1].num_drafted_tokens - before[1].num_drafted_tokens,
        num_accepted=after[1].num_accepted_draft_tokens - before[1].num_accepted_draft_tokens,
        num_drafted_by_model=after[1].num_draft_model_tokens - before[1].num_draft_model_tokens,
        num_accepted_of_model=(
            after[1].num_accepted_draft_model_tokens - before[1].num_accepted_draft_model_tokens
        ),
        num_other_replies=num_other,
    )


def _answer(engine: Engine, requests: Round) -> dict[str, list[int]]:
    """The tokens of each request's output."""
    replies: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for chunk in engine.step():
            replies[chunk.request_id] += chunk.token_ids
    return replies
