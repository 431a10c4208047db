"""Looking for markers in text that comes in pieces."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, short of all of it."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)


class Buffer:
    """Text that has come and is not used yet."""

    def __init__(self) -> None:
        self.text = ""
        self.is_last = False  # no text follows

    def take(self, num_characters: int) -> str:
        """The first characters, which are removed."""
        taken, self.text = self.text[:num_characters], self.text[num_characters:]
        return taken

    def take_until(self, *markers: str) -> tuple[str, str | None]:
        """What stands before the first marker, and that marker, which is removed.

        While there is none (None), what cannot be the beginning of one.
        """
        found = [(start, marker) for marker in markers if (start := self.text.find(marker)) >= 0]
        if found:
            start, marker = min(found)
            taken = self.take(start)
            self.take(len(marker))
            return taken, marker
        held = 0 if self.is_last else max(overlap(self.text, marker) for marker in markers)
        return self.take(len(self.text) - held), None

    def begins_with(self, marker: str) -> bool | None:
        """Whether the text begins with `marker`; None while that is open."""
        if self.text.startswith(marker):
            return True
        return None if marker.startswith(self.text) and not self.is_last else False


class TrailingSpace:
    """Holds white space back until it is known whether text follows it."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """The text up to its last character that is not white space."""
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        return kept

    def take(self) -> str:
        """The white space held back."""
        held, self._held = self._held, ""
        return held


class HeadState(Enum):
    """Whether a text begins as a call does."""

    PENDING = auto()
    NO = auto()


@dataclass(frozen=True, slots=True)
class CallHead:
    """The beginning of a call: `{"name": "...", "arguments": ` and its length."""

    name: str
    length: int


def match_call_head(text: str, arguments_key: str) -> CallHead | HeadState:
    """Read the beginning of a call, with any white space between its parts, up to its arguments' `{`."""
    position, name = 0, ""
    for part in ("{", '"name"', ":", None, ",", f'"{arguments_key}"', ":", "{"):
        position += len(text[position:]) - len(text[position:].lstrip())
        rest = text[position:]
        if part is None:
            end = rest.find('"', 1)
            if rest[:1] not in ("", '"'):
                return HeadState.NO
            if end < 0:
                return HeadState.PENDING
            name = rest[1:end]
            position += end + 1
        elif rest.startswith(part):
            position += len(part)
        else:
            return HeadState.PENDING if part.startswith(rest) else HeadState.NO
    return CallHead(name, position - 1)


class JsonObjectEnd:
    """Finds where a JSON object ends that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self.is_complete = False

    def scan(self, text: str) -> int:
        """How many characters of `text` belong to the object."""
        for position, character in enumerate(text):
            self._step(character)
            if self.is_complete:
                return position + 1
        return len(text)

    def _step(self, character: str) -> None:
        if self._is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._is_in_string = False
        elif character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_complete = self._depth == 0
