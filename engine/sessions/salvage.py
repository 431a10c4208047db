"""What can be kept of a damaged session: all whole records, also those behind the damage.

A turn whose record is lost leaves no gap: the turns behind it are numbered anew, and KV and layouts with
them. That is sound because keys are kept un-rotated: a turn's KV does not depend on where it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from dayshift.engine.sessions.record_format import Record, RecordKind
from dayshift.engine.sessions.records import SYSTEM, LayoutRecord, TurnRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """What `SessionStore.repair` did: `kept` is the damaged file, `lost_turns` are by their old numbers.

    A turn that stood at the end cannot be missed, only its record: `num_lost_records` counts all that is
    missing between whole ones.
    """

    kept: Path
    num_turns: int
    lost_turns: tuple[int, ...]
    num_lost_records: int


def salvaged(records: Iterable[Record]) -> tuple[list[Record], tuple[int, ...]]:
    """The whole records of a damaged file as a session without gaps, and the turns that are missing.

    `records`: all that is whole, the session's own first. KV of lost turns is left out.
    """
    records = list(records)
    turns = [record.header.turn_index for record in records if record.header.kind is RecordKind.TURN]
    numbers = {SYSTEM: SYSTEM} | {old: new for new, old in enumerate(turns)}
    lost = tuple(sorted(set(range(max(turns, default=-1) + 1)) - set(turns)))
    return [_renumbered(r, numbers) for r in records if r.header.turn_index in numbers], lost


def _renumbered(record: Record, numbers: Mapping[int, int]) -> Record:
    number = numbers[record.header.turn_index]
    payload = record.payload
    match record.header.kind:
        case RecordKind.TURN if number != record.header.turn_index:
            turn = msgspec.json.decode(payload, type=TurnRecord)
            payload = msgspec.json.encode(replace(turn, index=number))
        case RecordKind.LAYOUT:
            layout = msgspec.json.decode(payload, type=LayoutRecord)
            payload = msgspec.json.encode(
                replace(
                    layout,
                    num_turns=sum(0 <= old < layout.num_turns for old in numbers),
                    window_turns=_of(layout.window_turns, numbers),
                    recalled_turns=_of(layout.recalled_turns, numbers),
                )
            )
    return Record(replace(record.header, turn_index=number), payload)


def _of(turns: Iterable[int], numbers: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(numbers[turn] for turn in turns if turn in numbers)
