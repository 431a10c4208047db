"""Reading, merging and writing YAML with origins."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dayshift.experiments.yaml_tree import ConfigError, Node, dump_annotated, find, merge, parse, put

words = st.text(max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words
keys = st.text(st.characters(codec="ascii", categories=["L", "Nd"]), min_size=1, max_size=6)
mappings = st.recursive(
    st.dictionaries(keys, scalars, max_size=4),
    lambda inner: st.dictionaries(keys, inner | scalars | st.lists(inner | scalars, max_size=3), max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"), ("yes", "yes"), ("12:30", "12:30"), ("2026-11-29", "2026-11-29"), ("012", "012"),
        ("0x1f", "0x1f"), ("1_000", "1_000"), ("<<", "<<"), ("true", True), ("~", None), ("", None),
        ("1e-4", 1e-4), ("-3", -3), (".5", 0.5), ("[1, 2.0]", [1, 2.0]),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text, value):
    found = parse(text, "x").plain()
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "'a' is written twice"),
        ("a: 1\nb: [1, 2\n", 3, "not valid YAML"),
        ("a: 1\n1: x\n", 2, "found 1 as a key"),
        ("a:\n  ? [x]\n  : 1\n", 2, "as a key"),
        ("a: &x\n  b: *x\n", 1, "contains itself"),
        ("a: !!binary aGk=\n", 1, "no kind of value"),
        ("a: !!python/object:os.system x\n", 1, "not valid YAML"),
        ("\ta: 1\n", 1, "not valid YAML"),
    ],
)
def test_a_broken_file_is_told_with_its_line(text, line, problem):
    with pytest.raises(ConfigError) as caught:
        parse(text, "file.yaml")
    assert str(caught.value).startswith(f"file.yaml:{line}: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_value_knows_its_line():
    tree = parse("a:\n  b: 1\n  c:\n    - x\n    - {d: y}\n", "f")
    for path, value, origin in [
        (("a", "b"), 1, "f:2"),
        (("a", "c", 0), "x", "f:4"),
        (("a", "c", 1, "d"), "y", "f:5"),
    ]:
        assert find(tree, path) == Node(value, origin)
    assert find(tree, ("a", "c", 2)) is None
    assert find(tree, ("a", "b", "d")) is None


@given(mappings)
def test_what_is_dumped_reads_back_equal(data):
    text = dump_annotated(data, Node({}, "x"))
    assert (parse(text, "x").plain() or {}) == data
    assert (yaml.safe_load(text) or {}) == data, "a YAML 1.1 reader must see the same values"


@given(mappings, mappings)
def test_merge_is_a_deep_update(base, over):
    def update(below, above):
        both = below.keys() & above.keys()
        merged = {**below, **above}
        for key in both:
            if isinstance(below[key], dict) and isinstance(above[key], dict):
                merged[key] = update(below[key], above[key])
        return merged

    result = merge(_tree(base, "base"), _tree(over, "over"))
    assert result.plain() == update(base, over)


@given(mappings, st.lists(keys, min_size=1, max_size=3), scalars)
def test_put_then_find(data, path, value):
    tree = _tree(data, "base")
    try:
        changed = put(tree, path, Node(value, "new"))
    except ConfigError:
        above = [find(tree, path[:end]) for end in range(1, len(path))]
        in_the_way = [node for node in above if node and not isinstance(node.value, dict | None)]
        assert in_the_way, "only a scalar or a list in the way is refused"
        return
    assert find(changed, path) == Node(value, "new")
    assert tree.plain() == data, "the tree it was made from stays as it was"


def test_put_into_a_list_needs_an_item_that_is_there():
    tree = parse("a: [{b: 1}, {b: 2}]", "f")
    assert put(tree, ["a", "1", "b"], Node(3, "new")).plain() == {"a": [{"b": 1}, {"b": 3}]}
    with pytest.raises(ConfigError, match="found item '2', allowed: 0 to 1"):
        put(tree, ["a", "2", "b"], Node(3, "new"))


def _tree(data, origin):
    match data:
        case dict():
            return Node({key: _tree(value, origin) for key, value in data.items()}, origin)
        case list():
            return Node([_tree(value, origin) for value in data], origin)
        case _:
            return Node(data, origin)
