"""The quick yes or no agrees with jsonschema on whatever the published schemas are asked."""

import copy
import functools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from gates import quick, schema

SCALARS: list[Any] = [None, True, False, 0, 1, 1.0, -1, 0.5, 10**20, math.inf, "", "x", "a" * 64]
KEYWORDS: list[dict[str, Any]] = [
    {"type": "string"}, {"type": "object"}, {"type": "array"}, {"type": "boolean"}, {"type": "null"},
    {"type": "number"}, {"type": "integer"}, {"type": ["integer", "null"]}, {"enum": [1, "x", None]},
    {"enum": [[1], {"a": True}]}, {"const": True}, {"const": 1}, {"minimum": 1}, {"maximum": 0.5},
    {"exclusiveMinimum": 0}, {"exclusiveMaximum": 1}, {"minLength": 1}, {"minItems": 2}, {"maxItems": 1},
    {"minProperties": 1}, {"pattern": "^a+$"}, {"uniqueItems": True}, {"uniqueItems": False},
    {"properties": {"a": {"type": "integer"}}, "additionalProperties": False},
    {"properties": {"a": False}}, {"additionalProperties": {"type": "string"}}, {"required": ["a"]},
    {"items": {"type": "integer"}}, {"prefixItems": [{"const": 1}], "items": {"type": "string"}},
    {"prefixItems": [True, {"const": 1}]}, {"contains": {"const": 1}},
    {"allOf": [{"minimum": 0}, {"type": "number"}]}, {"anyOf": [{"minimum": 1}, {"type": "string"}]},
    {"oneOf": [{"type": "number"}, {"type": "integer"}]}, {"not": {"maximum": 1}},
    {"if": {"type": "number"}, "then": {"minimum": 1}, "else": {"type": "string"}},
    {"if": {"required": ["a"]}, "then": {"properties": {"a": {"const": 1}}}}, {"then": False, "else": False},
    {"$defs": {"one": {"const": 1}}, "items": {"$ref": "#/$defs/one"}}, {},
]  # fmt: skip
VALUES = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)


@given(value=VALUES)
@settings(max_examples=300, deadline=None)
def test_each_keyword_says_what_jsonschema_says(value: Any) -> None:
    for one in KEYWORDS:
        assert quick.compiled(one)(value) == Draft202012Validator(one).is_valid(value), one


def test_nan_is_a_number_to_both() -> None:
    """JSON has none; whoever reads it on purpose, as gate 07 does, refuses it by a check of its own."""
    for one in KEYWORDS:
        assert quick.compiled(one)(math.nan) == Draft202012Validator(one).is_valid(math.nan), one


def test_the_keywords_of_the_table_are_those_that_are_known() -> None:
    used = {name for one in KEYWORDS for name in one}
    assert used == (set(quick.MAKERS) - {"$ref"}) | {"$defs", "then", "else"}


@pytest.mark.parametrize("name", schema.NAMES)
def test_every_published_schema_is_known(name: str) -> None:
    quick.compiled(schema.load(name))


@pytest.mark.parametrize("one", [{"multipleOf": 2}, {"properties": {"a": {"format": "date"}}}, {"$ref": "x"}])
def test_what_is_not_known_is_left_to_jsonschema(
    one: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(quick.UnknownKeywordError):
        quick.compiled(one)
    monkeypatch.setattr(schema, "load", lambda name: {**one, "type": "integer", "minimum": 4})
    for cached in (schema._accepts, schema._validator):
        monkeypatch.setattr(schema, cached.__name__, functools.cache(cached.__wrapped__))
    if "$ref" not in one:
        assert schema.problems(2, "any") and not schema.problems(4, "any")


# ---- documents of the healthy workspace, spoiled in one place


@functools.cache
def _validator(name: str) -> Any:
    return Draft202012Validator(schema.load(name))


@pytest.fixture(scope="module")
def documents() -> list[tuple[str, Any]]:
    """A line or document of each kind, made from the schemas' own required keys."""
    return [(name, _example(schema.load(name), schema.load(name))) for name in schema.NAMES]


def _example(part: dict[str, Any], root: dict[str, Any]) -> Any:
    """Something near what `part` allows: it need not be valid, only deep."""
    if "$ref" in part:
        return _example(schema._followed(part, root), root)  # type: ignore[arg-type]
    for several in ("anyOf", "oneOf"):
        if several in part:
            return _example(part[several][0], root)
    if "const" in part or "enum" in part:
        return part.get("const", part.get("enum", [None])[0])
    kind = part.get("type", "object")
    simple = {"string": "x", "number": 1.5, "integer": 1, "boolean": True, "null": None}
    if kind == "array":
        return [_example(part["items"], root)] if isinstance(part.get("items"), dict) else []
    if kind == "object":
        return {
            name: _example(value, root)
            for name, value in part.get("properties", {}).items()
            if value is not False
        }
    return simple[kind if isinstance(kind, str) else kind[0]]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in pairs for place in [(value, key), *_places(item)]]


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_spoiled_document_is_refused_where_jsonschema_refuses_it(
    documents: list[tuple[str, Any]], data: st.DataObject
) -> None:
    name, original = data.draw(st.sampled_from(documents))
    document = copy.deepcopy(original)
    for _ in range(data.draw(st.integers(0, 2))):
        container, key = data.draw(st.sampled_from(_places(document) or [({}, "a")]))
        if isinstance(container, dict) and data.draw(st.booleans()):
            container.pop(key, None)
        elif isinstance(container, dict) or key < len(container):
            container[key] = data.draw(VALUES)
    assert quick.compiled(schema.load(name))(document) == _validator(name).is_valid(document)
