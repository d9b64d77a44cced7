"""A JSON Schema as nested functions: says in microseconds that a value is valid.

A run of 2000 steps has as many lines to check, and jsonschema takes about a millisecond for each. This knows only
the keywords that the published schemas use, and says only yes or no: what is wrong is for jsonschema to tell.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

Test = Callable[[Any], bool]
Maker = Callable[[Any, Mapping[str, Any], Mapping[str, Any]], Test]
"""the keyword's value, the schema that it stands in, and the document for its references"""

SILENT = {"$schema", "$id", "$defs", "title", "description", "default", "then", "else"}  # of `if`


class UnknownKeywordError(Exception):
    """The schema uses what is not known here: ask jsonschema."""


def compiled(schema: Mapping[str, Any]) -> Test:
    """True for exactly the values that `schema` allows. Raises UnknownKeywordError."""
    return _test(schema, schema)


def _test(schema: Any, root: Mapping[str, Any]) -> Test:
    if isinstance(schema, bool):
        return lambda value: schema
    unknown = set(schema) - set(MAKERS) - SILENT
    if unknown:
        raise UnknownKeywordError(", ".join(sorted(unknown)))
    tests = [MAKERS[name](given, schema, root) for name, given in schema.items() if name in MAKERS]
    return tests[0] if len(tests) == 1 else lambda value: all(test(value) for test in tests)


# ---- types and values


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: Mapping[str, Test] = {
    "string": lambda value: isinstance(value, str),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": _number,
    "integer": lambda value: _number(value) and (isinstance(value, int) or value.is_integer()),
}


def _type(given: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Test:
    if isinstance(given, str):
        return _TYPES[given]
    tests = [_TYPES[name] for name in given]
    return lambda value: any(test(value) for test in tests)


def _same(one: Any, other: Any) -> bool:
    """Equal in JSON, where true is not 1, as it is in Python."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _enum(given: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Test:
    return lambda value: any(_same(value, item) for item in given)


def _const(given: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Test:
    return _enum([given], schema, root)


def _bound(inside: Callable[[Any, Any], bool]) -> Maker:
    return lambda given, schema, root: lambda value: not _number(value) or inside(value, given)


def _size(
    kind: type[str] | type[list[Any]] | type[dict[str, Any]], inside: Callable[[int, int], bool]
) -> Maker:
    return lambda given, schema, root: lambda value: not isinstance(value, kind) or inside(len(value), given)


def _pattern(given: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Test:
    search = re.compile(given).search
    return lambda value: not isinstance(value, str) or search(value) is not None


# ---- mappings and lists


def _properties(given: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Test:
    tests = [(name, _test(part, root)) for name, part in given.items()]
    return lambda value: (
        not isinstance(value, dict) or all(name not in value or test(value[name]) for name, test in tests)
    )


def _additional(given: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Test:
    known, test = set(schema.get("properties", ())), _test(given, root)
    return lambda value: (
        not isinstance(value, dict) or all(test(value[name]) for name in value.keys() - known)
    )


def _required(given: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Test:
    names = set(given)
    return lambda value: not isinstance(value, dict) or names <= value.keys()


def _items(given: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Test:
    start, test = len(schema.get("prefixItems", ())), _test(given, root)
    return lambda value: not isinstance(value, list) or all(map(test, value[start:]))


def _prefix(given: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Test:
    tests = [_test(part, root) for part in given]
    return lambda value: (
        not isinstance(value, list) or all(test(item) for test, item in zip(tests, value, strict=False))
    )


def _contains(given: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Test:
    test = _test(given, root)
    return lambda value: not isinstance(value, list) or any(map(test, value))


def _unique(given: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Test:
    return lambda value: (
        not given
        or not isinstance(value, list)
        or not any(_same(one, other) for at, one in enumerate(value) for other in value[:at])
    )


# ---- of several schemas


def _some(enough: Callable[[list[bool]], bool]) -> Maker:
    def make(given: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Test:
        tests = [_test(part, root) for part in given]
        return lambda value: enough([test(value) for test in tests])

    return make


def _not(given: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Test:
    test = _test(given, root)
    return lambda value: not test(value)


def _if(given: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Test:
    condition = _test(given, root)
    then, other = _test(schema.get("then", True), root), _test(schema.get("else", True), root)
    return lambda value: then(value) if condition(value) else other(value)


def _ref(given: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Test:
    target: Any = root
    if not given.startswith("#/"):
        raise UnknownKeywordError(f"$ref to {given}")
    for part in given.removeprefix("#/").split("/"):
        target = target[part]
    return _test(target, root)


MAKERS: Mapping[str, Maker] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    # The other way round, as the specification has it: NaN, which is no JSON, is for the gates to refuse.
    "minimum": _bound(lambda value, given: not value < given),
    "maximum": _bound(lambda value, given: not value > given),
    "exclusiveMinimum": _bound(lambda value, given: not value <= given),
    "exclusiveMaximum": _bound(lambda value, given: not value >= given),
    "minLength": _size(str, lambda size, given: size >= given),
    "minItems": _size(list, lambda size, given: size >= given),
    "maxItems": _size(list, lambda size, given: size <= given),
    "minProperties": _size(dict, lambda size, given: size >= given),
    "pattern": _pattern,
    "properties": _properties,
    "additionalProperties": _additional,
    "required": _required,
    "items": _items,
    "prefixItems": _prefix,
    "contains": _contains,
    "uniqueItems": _unique,
    "allOf": _some(all),
    "anyOf": _some(any),
    "oneOf": _some(lambda found: found.count(True) == 1),
    "not": _not,
    "if": _if,
    "$ref": _ref,
}
