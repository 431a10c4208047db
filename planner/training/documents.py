"""Operations as token rows: what each token is, may see, and counts in the loss.

A document is one stretch of a session. It begins with a call's context and goes on call after call:
turns that leave the window expire, recalled turns are written again before their question and expire
when they leave. So one row teaches every reply of the stretch under exactly the context that its
call has, and keys and values stay as they were computed, as in the engine.

Token k is visible to token q of the same row when

    k <= q < expiry[k]  and  (group[q] == 0 or group[q] == group[k] or group[k] == SYSTEM_GROUP)

Recalled turns carry a group of their own in half of the documents: they see the system prompt and
each other only, as when they were first computed, before the turns now in the window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import numpy as np
from tokenizers import Tokenizer

from dayshift.planner.protocol import SYSTEM_PROMPTS
from dayshift.planner.training.memory import Context, MemoryRules, SessionMemory
from dayshift.planner.training.operations import Operation, Turn, TurnKind, make_operation, random_shape
from dayshift.planner.training.tokenizer import TURN_END, TURN_START

SYSTEM_GROUP = -1
REVIEW_WEIGHT = 3
_TOKENS_PER_TURN = 26  # about, for choosing sizes


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch. All arrays are (num_rows, row_length); a reply's tokens share a number > 0."""

    ids: np.ndarray  # int32
    weight: np.ndarray  # uint8: 0 not taught, 1 action, REVIEW_WEIGHT review
    expiry: np.ndarray  # int32: the first position in the row that no longer sees this token
    group: np.ndarray  # int32
    reply: np.ndarray  # int32


@dataclass(frozen=True, slots=True)
class EncodedTurn:
    """Token ids of a turn: user message with generation prompt, then the reply and its end."""

    prompt: list[int]
    reply: list[int]
    kind: TurnKind


class TurnEncoder:
    """Encodes turns exactly as the chat template renders them; remembers texts it has seen."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[str, list[int]] = {}
        self.user = self._encode(f"{TURN_START}user\n")
        self.assistant = self._encode(f"{TURN_END}\n{TURN_START}assistant\n")
        self.end = self._encode(TURN_END)
        self.newline = self._encode("\n")
        self.system = self._encode(f"{TURN_START}system\n{SYSTEM_PROMPTS['compact']}{TURN_END}\n")

    def encode(self, turn: Turn) -> EncodedTurn:
        """Encode one turn, without the newline after its end."""
        return EncodedTurn(
            self.user + self._encode(turn.user) + self.assistant,
            self._encode(turn.reply) + self.end,
            turn.kind,
        )

    def _encode(self, text: str) -> list[int]:
        ids = self._cache.get(text)
        if ids is None:
            if len(self._cache) > 50_000:
                self._cache.clear()
            ids = self._cache[text] = self._tokenizer.encode(text).ids
        return ids


class Document:
    """The growing arrays of one stretch of a session."""

    def __init__(self, system: list[int], newline: list[int], *, is_recall_isolated: bool) -> None:
        self.ids: list[int] = []
        self.weight: list[int] = []
        self.group: list[int] = []
        self.reply: list[int] = []
        self.expired: list[tuple[int, int, int]] = []  # (start, end, expiry)
        self._newline = newline
        self._is_recall_isolated = is_recall_isolated
        self._window: dict[int, tuple[int, int]] = {}  # turn -> its tokens
        self._recalled: tuple[int, ...] = ()
        self._copies: tuple[int, int] | None = None
        self._num_groups = 0
        self._num_replies = 0
        self._append(system, 0, SYSTEM_GROUP)

    def add_call(self, context: Context, turns: list[EncodedTurn], *, is_taught: bool) -> None:
        """Bring the visible turns in line with `context`, then write its turn."""
        for index in [index for index in self._window if index < context.turn - len(context.window)]:
            start, end = self._window.pop(index)
            self.expired.append((start, end, len(self.ids)))
        if context.recalled != self._recalled:
            self._write_recalled(context.recalled, turns)
        self.add_turn(context.turn, turns[context.turn], is_taught=is_taught)

    def add_turn(self, index: int, turn: EncodedTurn, *, is_taught: bool) -> None:
        """Write a turn into the window."""
        start = len(self.ids)
        self._append(turn.prompt, 0, 0)
        weight = {TurnKind.ACTION: 1, TurnKind.REVIEW: REVIEW_WEIGHT, TurnKind.SPOILED: 0}[turn.kind]
        self._num_replies += 1
        self._append(turn.reply, weight if is_taught else 0, 0, self._num_replies)
        self._append(self._newline, 0, 0)
        self._window[index] = (start, len(self.ids))

    def _write_recalled(self, recalled: tuple[int, ...], turns: list[EncodedTurn]) -> None:
        if self._copies is not None:
            self.expired.append((*self._copies, len(self.ids)))
        self._recalled, self._copies = recalled, None
        if recalled:
            start = len(self.ids)
            self._num_groups += self._is_recall_isolated
            group = self._num_groups if self._is_recall_isolated else 0
            for index in recalled:
                self._append(turns[index].prompt + turns[index].reply + self._newline, 0, group)
            self._copies = (start, len(self.ids))

    def _append(self, ids: list[int], weight: int, group: int, reply: int = 0) -> None:
        self.ids += ids
        self.weight += [weight] * len(ids)
        self.group += [group] * len(ids)
        self.reply += [reply if weight else 0] * len(ids)


def build_document(
    rng: Random,
    operation: Operation,
    rules: MemoryRules,
    encoder: TurnEncoder,
    *,
    max_tokens: int,
    recall_rate: float,
    start: int | None = None,
) -> Document:
    """One stretch of the session that plays `operation`, from the call of turn `start` on.

    None draws it: the first call, or one just before a review.
    """
    turns = [encoder.encode(turn) for turn in operation.turns]
    newline = encoder.newline if rng.random() < 0.9 else []
    lengths = [len(turn.prompt) + len(turn.reply) + len(newline) for turn in turns]
    if start is None:
        start = _choose_start(rng, operation, sum(lengths), max_tokens)
    memory = SessionMemory(rules, num_system_tokens=len(encoder.system), turn_lengths=lengths)
    document = Document(encoder.system, newline, is_recall_isolated=rng.random() < 0.5)
    for index, turn in enumerate(operation.turns):
        hours = operation.hours[turn.shift] if turn.shift else None
        context = memory.call(hours if hours and rng.random() < recall_rate else None)
        if index < start:
            continue
        if index == start:
            for old in context.window:
                before = Context(tuple(range(context.window[0], old)), (), old, old)
                is_taught = is_determined(operation.turns[old], operation, before)
                document.add_turn(old, turns[old], is_taught=is_taught)
        document.add_call(context, turns, is_taught=is_determined(turn, operation, context))
        if len(document.ids) >= max_tokens:
            break
    return document


def is_determined(turn: Turn, operation: Operation, context: Context) -> bool:
    """Whether what `context` shows determines the reply of its turn; no other reply is ever taught."""
    if not context.has_range(turn.since, context.turn):
        return False
    return not turn.shift or context.has_range(*operation.hours[turn.shift])


def _choose_start(rng: Random, operation: Operation, num_tokens: int, max_tokens: int) -> int:
    if num_tokens * 1.3 < max_tokens and rng.random() < 0.7:
        return 0
    reviews = [index for index, turn in enumerate(operation.turns) if turn.kind is TurnKind.REVIEW]
    return max(0, rng.choice(reviews) - rng.choice((0, 1, 10, 40)))


def random_document(rng: Random, encoder: TurnEncoder, *, max_window: int, max_tokens: int) -> Document:
    """A document of the training mixture, cut at about `max_tokens`."""
    # Half of the windows near the largest: a review out of 40 shifts is the hardest reply to learn.
    smallest = 256 if rng.random() < 0.5 else max_window // 2
    window = round(math.exp(rng.uniform(math.log(smallest), math.log(max_window))))
    window = max(256, min(window, max_tokens // 2))
    num_tokens = window * rng.choice((0.4, 0.8, 1.2, 1.6, 2.2))  # from full history to long gone
    shape = random_shape(
        rng,
        max_turns=max(4, round(num_tokens / _TOKENS_PER_TURN)),
        max_shift_turns=max(4, round(0.8 * window / _TOKENS_PER_TURN)),
    )
    rules = MemoryRules(
        window=window,
        low_water=rng.choice((0.3, 0.5, 0.75, 0.75, 0.9)),
        is_recall_kept=rng.random() < 0.6,
        recall_margin=rng.choice((0, 0, 0, 2, 5)),
    )
    operation = make_operation(rng, shape)
    recall_rate = rng.choice((1.0, 1.0, 0.8))
    return build_document(rng, operation, rules, encoder, max_tokens=max_tokens, recall_rate=recall_rate)


def make_rows(
    seed: int, encoder: TurnEncoder, *, num_rows: int, row_length: int, max_window: int, max_document: int
) -> Rows:
    """A batch of the training mixture: rows packed full with documents of at most `max_document` tokens."""
    rng = Random(seed)
    shape = (num_rows, row_length)
    rows = Rows(
        ids=np.zeros(shape, np.int32),
        weight=np.zeros(shape, np.uint8),
        expiry=np.zeros(shape, np.int32),
        group=np.zeros(shape, np.int32),
        reply=np.zeros(shape, np.int32),
    )
    for row in range(num_rows):
        start = num_groups = num_replies = 0
        while start < row_length:
            room = min(max_document, row_length - start)
            document = random_document(rng, encoder, max_window=max_window, max_tokens=room)
            stop = min(start + len(document.ids), start + room)
            place_document(rows, row, start, stop, document, num_groups, num_replies)
            num_groups = max(num_groups, int(rows.group[row, start:stop].max()))
            num_replies = max(num_replies, int(rows.reply[row, start:stop].max()))
            start = stop
    return rows


def place_document(
    rows: Rows, row: int, start: int, stop: int, document: Document, num_groups: int = 0, num_replies: int = 0
) -> None:
    """Write a document into row[start:stop], cutting its end; groups and replies are renumbered."""
    length = stop - start
    rows.ids[row, start:stop] = document.ids[:length]
    rows.weight[row, start:stop] = document.weight[:length]
    group = np.asarray(document.group[:length])
    rows.group[row, start:stop] = np.where(group > 0, group + num_groups, group)
    reply = np.asarray(document.reply[:length])
    rows.reply[row, start:stop] = np.where(reply > 0, reply + num_replies, 0)
    rows.expiry[row, start:stop] = stop
    for first, end, expiry in document.expired:
        rows.expiry[row, start + first : min(start + end, stop)] = min(start + expiry, stop)
