"""The tables of docs/api.md: every field of OpenAI's API, and what becomes of it here.

Read off the models of the request bodies and the official client's types, so that they cannot say
anything else than the code does. `python -m tests.engine.server.api_table` writes them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.conversations import conversation_create_params as conversation_params
from openai.types.responses import response_create_params as response_params
from pydantic import BaseModel

from dayshift.engine.server.chat_fields import ChatRequest
from dayshift.engine.server.openai_fields import CompletionRequest
from dayshift.engine.server.response_fields import ConversationRequest, ResponseRequest

PAGE = Path(__file__).parents[3] / "docs" / "api.md"
BEGIN, END = "<!-- fields: begin -->", "<!-- fields: end -->"

_ENDPOINTS: list[tuple[str, type[BaseModel], Any]] = [
    ("POST /v1/chat/completions", ChatRequest, chat_params.CompletionCreateParamsBase),
    ("POST /v1/completions", CompletionRequest, completion_params.CompletionCreateParamsBase),
    ("POST /v1/responses", ResponseRequest, response_params.ResponseCreateParamsBase),
    ("POST /v1/conversations", ConversationRequest, conversation_params.ConversationCreateParams),
]


def tables() -> str:
    """All tables, as Markdown."""
    return "\n\n".join(_table(*endpoint) for endpoint in _ENDPOINTS)


def page_with_tables(page: str) -> str:
    """The page with its tables made anew."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}"


def _table(name: str, model: type[BaseModel], official: Any) -> str:
    schema = model.model_json_schema(by_alias=True)
    properties: dict[str, Any] = schema["properties"]
    theirs = {*get_type_hints(official), "stream"}
    rows = [f"### `{name}`", "", "| field | | values |", "|---|---|---|"]
    for field in sorted(theirs | set(properties)):
        if field not in properties:
            rows.append(f"| `{field}` | refused | |")
            continue
        values = _values(properties[field], schema.get("$defs", {}))
        kind = "own" if field not in theirs else "neutral" if _is_neutral(properties[field]) else "yes"
        rows.append(f"| `{field}` | {kind} | {values} |")
    return "\n".join(rows)


def _is_neutral(schema: dict[str, Any]) -> bool:
    """Only values that change nothing are accepted."""
    if "const" in schema or schema.get("maxItems") == 0:
        return True
    return schema.get("enum") == ["auto", "default"] or "const" in schema.get("items", {})


def _values(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """What a field takes, in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"object {_words(name)}" if definitions[name].get("type") == "object" else _words(name)
    if "anyOf" in schema:
        members = [_values(member, definitions) for member in schema["anyOf"] if member.get("type") != "null"]
        return " or ".join(dict.fromkeys(members))
    if "const" in schema:
        return f"only `{_plain(schema['const'])}`" if schema["const"] != "" else "only empty"
    if "enum" in schema:
        return ", ".join(f"`{_plain(value)}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    if schema.get("maxItems") == 0:
        return "only empty"
    if kind in ("integer", "number"):
        return f"{kind}{_bounds(schema)}"
    if kind == "array":
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list{most}"
    return kind


def _bounds(schema: dict[str, Any]) -> str:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None or high is None:
        return ""
    words = "above" if "exclusiveMinimum" in schema else "from"
    if high >= 2**31 - 1:
        return f", {words} {low:g}" if abs(low) < 2**31 else ""
    return f", {words} {low:g} to {high:g}"


def _words(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


def _plain(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
