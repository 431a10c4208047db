"""YAML as a tree whose every value knows where it was written.

The scalars are those of YAML 1.2's core schema: `off`, `yes` and `12:30` are words, `1e-4` is a
number. A key written twice is an error. Trees merge (`extends:`), and take single values by dotted
path (`--set a.b=c`), without losing the origins; error messages and `--dry-run` print them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dayshift.types import DayshiftError

Scalar = None | bool | int | float | str
Key = str | int


class ConfigError(DayshiftError):
    """A mistake in the configuration or on the command line: one line; the process exits with 2."""


@dataclass(frozen=True, slots=True)
class Node:
    """A value of the tree and where it was written ("quickstart.yaml:12", "--set", …)."""

    value: dict[str, Node] | list[Node] | Scalar
    origin: str

    def plain(self) -> Any:
        """The value without its origins."""
        match self.value:
            case dict(children):
                return {key: child.plain() for key, child in children.items()}
            case list(items):
                return [item.plain() for item in items]
            case scalar:
                return scalar


class CoreDumper(yaml.SafeDumper):
    """Writes scalars so that the core schema reads the same values back."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Text of several lines is written on one, with escapes; YAML's other styles would fold it."""
    style = '"' if text.splitlines() not in ([], [text]) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


CoreDumper.add_representer(str, _represent_text)


class _CoreLoader(yaml.SafeLoader):
    """Reads the scalars of YAML 1.2's core schema instead of YAML 1.1's."""


_CORE_SCALARS = [
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
]
for _class in (_CoreLoader, CoreDumper):
    _class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in _CORE_SCALARS:
        _class.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), _first)
# The dumper quotes what YAML 1.1 readers would take for something else, so the files it writes
# mean the same to both.
for _first_letter, _resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items():
    for _tag, _regexp in _resolvers:
        CoreDumper.add_implicit_resolver(_tag, _regexp, [_first_letter])


def read_file(path: Path, label: str) -> Node:
    """The tree of a YAML file. `label` stands for the file in origins and messages."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{label}: is not UTF-8 text") from error
    tree = parse(text, label)
    if tree.value is None:
        return Node({}, tree.origin)
    if not isinstance(tree.value, dict):
        raise ConfigError(f"{label}: found {describe(tree.plain())}, expected keys and values")
    return tree


def parse(text: str, label: str, *, with_lines: bool = True) -> Node:
    """The tree of a YAML text. `with_lines=False` for a value from the command line."""
    loader = _CoreLoader(text)
    try:
        node = loader.get_single_node()
        return _convert(loader, node, label, with_lines, ()) if node else Node(None, label)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{label}:{mark.line + 1}" if mark and with_lines else label
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}: not valid YAML ({' '.join(problem.split())})") from error
    finally:
        loader.dispose()


def _convert(
    loader: _CoreLoader, node: yaml.Node, label: str, with_lines: bool, ancestors: tuple[yaml.Node, ...]
) -> Node:
    origin = f"{label}:{node.start_mark.line + 1}" if with_lines else label
    if any(node is ancestor for ancestor in ancestors):
        raise ConfigError(f"{origin}: an alias contains itself")
    ancestors = (*ancestors, node)
    if isinstance(node, yaml.MappingNode):
        children: dict[str, Node] = {}
        for key_node, value_node in node.value:
            where = f"{label}:{key_node.start_mark.line + 1}" if with_lines else label
            key = loader.construct_object(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise ConfigError(f"{where}: found {describe(key)} as a key, expected a word")
            if key in children:
                raise ConfigError(f"{where}: key {key!r} is written twice")
            child = _convert(loader, value_node, label, with_lines, ancestors)
            children[key] = Node(child.value, where)
        return Node(children, origin)
    if isinstance(node, yaml.SequenceNode):
        return Node([_convert(loader, item, label, with_lines, ancestors) for item in node.value], origin)
    value = loader.construct_object(node)
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ConfigError(f"{origin}: {node.tag} is no kind of value that a configuration has")
    return Node(value, origin)


def merge(base: Node, over: Node) -> Node:
    """`over` on top of `base`: mappings merge key by key, everything else is replaced."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    children = dict(base.value)
    for key, child in over.value.items():
        children[key] = merge(children[key], child) if key in children else child
    return Node(children, base.origin)


def put(tree: Node, path: Sequence[Key], node: Node) -> Node:
    """The tree with `node` merged in at `path`. A number picks an item of a list that is there.

    Raises ConfigError when the path runs through a value that has no keys, or past a list's end.
    """
    if not path:
        return merge(tree, node)
    key, *rest = path
    if isinstance(tree.value, list):
        index = int(key) if str(key).isdecimal() else len(tree.value)
        if index >= len(tree.value):
            allowed = f"0 to {len(tree.value) - 1}" if tree.value else "none, the list is empty"
            raise ConfigError(f"{node.origin}: found item {key!r}, allowed: {allowed}")
        items = [put(item, rest, node) if i == index else item for i, item in enumerate(tree.value)]
        return Node(items, tree.origin)
    children = tree.value if isinstance(tree.value, dict) else {}
    if tree.value is not None and not isinstance(tree.value, dict):
        raise ConfigError(f"{node.origin}: no key {key!r} in {describe(tree.value)}")
    child = put(children.get(str(key), Node(None, node.origin)), rest, node)
    return Node({**children, str(key): child}, tree.origin)


def find(tree: Node, path: Sequence[Key]) -> Node | None:
    """The node at `path`, or None."""
    for key in path:
        match tree.value:
            case dict(children) if key in children:
                tree = children[str(key)]
            case list(items) if isinstance(key, int) and key < len(items):
                tree = items[key]
            case _:
                return None
    return tree


def leaf_origins(tree: Node, path: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], str]]:
    """(path, origin) of each value below which there is nothing."""
    match tree.value:
        case dict(children) if children:
            for key, child in children.items():
                yield from leaf_origins(child, (*path, key))
        case list(items) if items:
            for index, item in enumerate(items):
                yield from leaf_origins(item, (*path, index))
        case _:
            yield path, tree.origin


def dump_annotated(data: dict[str, Any], tree: Node, default: str = "default") -> str:
    """`data` as YAML, each value followed by a comment that says where it was written."""
    rows = list(_rows(data, tree, 0, default))
    width = min(max((len(text) for text, _ in rows), default=0), 72)
    return "".join(f"{text:<{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in rows)


def _rows(
    value: dict[str, Any] | list[Any], tree: Node | None, depth: int, default: str
) -> Iterator[tuple[str, str]]:
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        indent = "  " * depth
        head = f"{_inline(key)}:" if isinstance(key, str) else "-"
        node = find(tree, (key,)) if tree else None
        if not isinstance(child, dict | list) or not child or _is_flat(child):
            yield f"{indent}{head} {_inline(child)}", node.origin if node else default
            continue
        rows = _rows(child, node, depth + 1, default)
        if head == "-":
            text, origin = next(rows)
            yield f"{indent}- {text.lstrip()}", origin
        else:
            yield f"{indent}{head}", ""
        yield from rows


def _is_flat(value: dict[str, Any] | list[Any]) -> bool:
    """A list of scalars stays on one line."""
    return isinstance(value, list) and not any(isinstance(item, dict | list) for item in value)


def _inline(value: Any) -> str:
    text = yaml.dump(
        value, Dumper=CoreDumper, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")


def describe(value: Any) -> str:
    """A value as a message shows it, short."""
    match value:
        case dict():
            return "a mapping"
        case list() if len(value) > 3 or any(isinstance(item, dict | list) for item in value):
            return "a list"
        case _:
            text = repr(value) if isinstance(value, str) else _inline(value)
            return text if len(text) <= 60 else f"{text[:57]}…"
