"""The table of every configuration key, made from the models: `docs/experiments.md` ends with it.

`python -m dayshift.experiments.reference docs/experiments.md` brings the page up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dayshift.experiments.config import Experiment
from dayshift.experiments.mistakes import sections_in
from dayshift.experiments.yaml_tree import describe

BEGIN = "<!-- begin: made by python -m dayshift.experiments.reference -->"
END = "<!-- end -->"


def with_reference(page: str) -> str:
    """The page with the part between the two markers brought up to date."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


def reference() -> str:
    """A heading and a table per section, in the order of a configuration file."""
    return "\n".join(_section("", Experiment))


def _section(path: str, model: type[BaseModel]) -> Iterator[str]:
    title = f"`{path}`" if path else "Top level"
    yield f"### {title}\n"
    if path:
        yield f"{_one_line(model.__doc__)}\n"
    yield "| key | values | default | |"
    yield "|---|---|---|---|"
    sections: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        found = [(f"{path}.{name}".lstrip("."), section) for section in sections_in(field.annotation)]
        sections += found
        if not found:
            about = _one_line(field.description)
            yield f"| `{name}` | {_values(model, name)} | {_default(field)} | {about} |"
    for name, section in sections:
        yield ""
        yield from _section(name, section)


def _values(model: type[BaseModel], name: str) -> str:
    """What a key takes, from its JSON schema."""
    schema = model.model_json_schema()
    return _describe_schema(schema["properties"][name], schema.get("$defs", {}))


def _describe_schema(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rsplit("/", 1)[-1]]
    if "anyOf" in schema:
        (schema,) = [part for part in schema["anyOf"] if part.get("type") != "null"]
    if "enum" in schema:
        return " · ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    match schema["type"]:
        case "array":
            return f"list of {_describe_schema(schema['items'], definitions)}"
        case "integer" | "number" as kind:
            return f"{'whole number' if kind == 'integer' else 'number'}{_range(schema)}"
        case "boolean":
            return "`true` · `false`"
        case _:
            return "text"


def _range(schema: dict[str, Any]) -> str:
    bounds = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"))
    found = [f"{sign} {schema[key]}" for key, sign in bounds if key in schema]
    return " " + ", ".join(found) if found else ""


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "must be given"
    if field.default is None:
        return ""
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{value}`" if isinstance(value, str) else f"`{describe(value)}`"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        page = Path(argument)
        page.write_text(with_reference(page.read_text(encoding="utf-8")), encoding="utf-8")
