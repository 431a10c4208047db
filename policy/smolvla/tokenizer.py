"""Instructions to token ids, with the tokenizer of the policy's vision-language model."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from dayshift.policy.smolvla.model import ImageTokens
from dayshift.types import DayshiftError

_NUM_REMEMBERED = 1024  # instructions


class InstructionTokenizer:
    """Text to ids, cut at `max_length`. Raises DayshiftError when the folder has no tokenizer.json."""

    def __init__(self, vlm: Path, *, max_length: int, ends_with_newline: bool) -> None:
        self._path = vlm / "tokenizer.json"
        if not self._path.is_file():
            raise DayshiftError(f"{vlm} has no tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(self._path))
        except Exception as error:  # the library raises nothing narrower
            raise DayshiftError(f"{self._path}: not a tokenizer ({error})") from error
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_length)
        self._ends_with_newline = ends_with_newline
        self.encode = lru_cache(maxsize=_NUM_REMEMBERED)(self._encode)
        """Token ids of one instruction, ended with a newline if the policy was trained so. A robot sends the
        same one many times."""

    def _encode(self, instruction: str) -> tuple[int, ...]:
        if self._ends_with_newline and not instruction.endswith("\n"):
            instruction += "\n"
        return tuple(self._tokenizer.encode(instruction).ids)

    def image_tokens(self) -> ImageTokens:
        """Ids of the tokens around an image, named in tokenizer_config.json."""
        path = self._path.with_name("tokenizer_config.json")
        try:
            config: dict[str, Any] = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise DayshiftError(f"{path} is not a readable JSON file: {error}") from error
        extra = config.get("extra_special_tokens")
        named = config | extra if isinstance(extra, dict) else config
        ids = [self._id_of(path, named, name) for name in ("fake_image_token", "global_image_token")]
        return ImageTokens(*ids)

    def _id_of(self, path: Path, named: dict[str, Any], name: str) -> int:
        token = named.get(name)
        token_id = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        if token_id is None:
            raise DayshiftError(f"{path}: there is no {name} that the tokenizer knows")
        return token_id
