"""What a `Tokenizer` is made of, read from a folder as Hugging Face writes it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from dayshift.types import DayshiftError


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """A model's tokenizer, chat template and the tokens that it names.

    `special_tokens` holds `bos_token` and the like, by name, as templates expect them;
    `template_origin` says in errors where the template is from.
    """

    tokenizer: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    eos_token_ids: frozenset[int]
    chat_template: str | None
    template_origin: str


def read_tokenizer_folder(folder: Path) -> TokenizerParts:
    """Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja,
    generation_config.json and config.json.

    Raises DayshiftError when there is no readable tokenizer.json.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DayshiftError(
            f"{folder}: no tokenizer.json; a model folder in Hugging Face format or a .gguf file is needed"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise DayshiftError(f"{path}: not a tokenizer ({error})") from error
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = _named_special_tokens(_read_json(folder / "special_tokens_map.json") | config)
    template, origin = _read_template(folder, config)
    return TokenizerParts(
        tokenizer=tokenizer,
        special_tokens=special_tokens,
        eos_token_ids=_read_eos_token_ids(folder, tokenizer, special_tokens),
        chat_template=template,
        template_origin=origin,
    )


def _read_eos_token_ids(
    folder: Path, tokenizer: tokenizers.Tokenizer, special_tokens: dict[str, str]
) -> frozenset[int]:
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    if (token := special_tokens.get("eos_token")) is not None:
        token_id = tokenizer.token_to_id(token)
        ids.update([] if token_id is None else [token_id])
    return frozenset(ids)


def _read_template(folder: Path, config: dict[str, Any]) -> tuple[str | None, str]:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8"), str(path)
    source = config.get("chat_template")
    if isinstance(source, list):  # several templates by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return source, str(folder / "tokenizer_config.json")


def _named_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        match config.get(name):
            case str(text) | {"content": str(text)}:
                named[name] = text
    return named


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DayshiftError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise DayshiftError(f"{path}: expected a JSON object")
    return content
