"""The text side of a running generation: decoding as tokens come, and stop strings."""

from __future__ import annotations

from dayshift.engine.dialects.text import overlap
from dayshift.engine.tokenizer import Tokenizer


class OutputText:
    """Turns generated tokens into text pieces that are safe to send.

    A piece never ends inside a character, and never holds the beginning of a stop string that
    might still be completed: text once sent is never taken back.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...], *, skip_special_tokens: bool = True
    ) -> None:
        self._decoder = tokenizer.stream_decoder(skip_special_tokens=skip_special_tokens)
        self._stop = stop
        self._held = ""  # decoded, but may turn out to be part of a stop string
        self.text = ""  # everything sent so far
        self.is_stopped = False

    def push(self, token_id: int) -> str:
        """The text that this token makes safe to send; `is_stopped` once a stop string is complete."""
        piece = self._release(self._decoder.push((token_id,)))
        self.text += piece
        return piece

    def finish(self) -> str:
        """What is left when no token follows."""
        if self.is_stopped:
            return ""
        piece = self._release(self._decoder.finish()) + self._held
        self._held = ""
        self.text += piece
        return piece

    def _release(self, piece: str) -> str:
        if not self._stop:
            return piece
        text = self._held + piece
        # The one completed first counts, so that the result does not depend on the tokens' borders.
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            self._held = ""
            return text[: min(found)[1]]
        num_held = max(overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]
