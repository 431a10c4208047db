"""Says a mistake in a configuration in one line: where, what was found, what is allowed."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dayshift.experiments.yaml_tree import ConfigError, Key, Node, describe, find

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "model_type": "keys and values",
    "dict_type": "keys and values",
}


def as_config_error(error: ValidationError, model: type[BaseModel], tree: Node) -> ConfigError:
    """The first mistake that pydantic found in `tree`, and how many more there are."""
    first, *more = error.errors()
    rest = f" (and {len(more)} more mistake{'s' if len(more) > 1 else ''})" if more else ""
    return mistake(tree, first["loc"], _explain(first, model) + rest)


def mistake(tree: Node, path: Sequence[Key], text: str) -> ConfigError:
    """A ConfigError about the value at `path`: origin, dotted path, text."""
    node = next((node for end in range(len(path), -1, -1) if (node := find(tree, path[:end]))), tree)
    name = dotted(path)
    where = node.origin if node.origin.endswith(f" {name}") or not path else f"{node.origin}: {name}"
    return ConfigError(f"{where}: {text}")


def dotted(path: Iterable[Key]) -> str:
    """A path as `--set` takes it."""
    return ".".join(str(key) for key in path)


def not_one_of(found: Any, allowed: Sequence[str]) -> str:
    """The text of a mistake where only certain words are allowed, with a close match."""
    close = get_close_matches(found, allowed, n=1) if isinstance(found, str) else []
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"found {describe(found)}{hint}, allowed: {', '.join(allowed)}"


def _explain(error: ErrorDetails, model: type[BaseModel]) -> str:
    found, context = describe(error["input"]), error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            key = str(error["loc"][-1])
            allowed = list(_model_at(model, error["loc"][:-1]).model_fields)
            if len(error["loc"]) == 1:
                allowed += ["extends", "matrix"]
            close = get_close_matches(key, allowed, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            return f"unknown key; {hint}allowed: {', '.join(allowed)}"
        case "missing":
            return "missing; it has to be given"
        case "enum" | "literal_error":
            allowed = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
            return not_one_of(error["input"], allowed)
        case "value_error":
            return str(context["error"])
        case "string_pattern_mismatch":
            return f"found {found}, allowed: text that matches {context['pattern']}"
        case "too_short":
            return f"found {found}, allowed: at least {context['min_length']} item(s)"
        case kind if kind in _EXPECTED:
            return f"found {found}, allowed: {_EXPECTED[kind]}"
        case _:
            requirement = error["msg"].removeprefix("Input should ").removeprefix("be ")
            return f"found {found}, allowed: {requirement}"


def _model_at(model: type[BaseModel], path: Sequence[Key]) -> type[BaseModel]:
    """The section that `path` leads to."""
    for key in path:
        if isinstance(key, str):
            model = next(sections_in(model.model_fields[key].annotation))
    return model


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that an annotation is made of: `tuple[X, ...] | None` contains X."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType, tuple, Annotated):
        for argument in get_args(annotation):
            yield from sections_in(argument)
