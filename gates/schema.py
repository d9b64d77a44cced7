"""The published schemas: find, validate against, and fill a config's defaults from them."""

import copy
import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from gates.evidence import EvidenceError, read_json
from gates.packaged import data_dir

NAMES = (
    "cache-entry", "cache-manifest", "config", "evidence", "metrics", "probe", "run", "saves", "skip", "target",
    "verdict",
)  # fmt: skip


@cache
def load(name: str) -> dict[str, Any]:
    path = data_dir("schemas") / f"{name}.schema.json"
    document: dict[str, Any] = read_json(path, f"schemas/{path.name}")
    return document


@cache
def _validator(name: str) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(load(name))


@cache
def _accepts(name: str) -> Callable[[Any], bool]:
    from gates import quick

    try:
        return quick.compiled(load(name))
    except quick.UnknownKeywordError:
        return lambda value: bool(_validator(name).is_valid(value))


def errors(value: Any, name: str) -> list[Any]:
    """jsonschema's errors, in the order of the document."""
    if _accepts(name)(value):
        return []
    return sorted(
        _validator(name).iter_errors(value), key=lambda error: [str(p) for p in error.absolute_path]
    )


def problems(value: Any, name: str) -> list[str]:
    """One line for each thing in `value` that schema `name` forbids."""
    return [line for error in errors(value, name) for line in describe(error)]


def require(value: Any, name: str, shown: str) -> Any:
    """`value`, or EvidenceError that names its first fault."""
    if not _accepts(name)(value):
        raise EvidenceError(shown, f"is no {name}: {problems(value, name)[0]}")
    return value


def describe(error: Any) -> Iterator[str]:
    """`path: what was seen, what is expected`, in words; a line for each unknown key."""
    where = dotted(error.absolute_path)
    if error.validator == "additionalProperties" and error.validator_value is False:
        known = list(error.schema.get("properties", {}))
        for key in sorted(set(error.instance) - set(known)):
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "known here: " + ", ".join(sorted(known))
            yield f"{f'{where}.' if where else ''}{key}: unknown key; {hint}"
    elif error.validator == "required":
        missing = [key for key in error.validator_value if key not in error.instance]
        yield f"{f'{where}.' if where else ''}{missing[0]}: missing"
    elif error.validator in ("anyOf", "oneOf") and error.context:
        kinds = [option for option in error.validator_value if "type" in option or "enum" in option]
        yield f"{where}: saw {_show(error.instance)}, expected " + (
            " or ".join(map(_kind, kinds)) or "another"
        )
    else:
        yield f"{where or 'top level'}: saw {_show(error.instance)}, expected {_expected(error)}"


def dotted(path: Any) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return (text if len(text) <= 60 else text[:57] + "...") + (" (text)" if isinstance(value, str) else "")


_WORDS = {
    "string": "text",
    "object": "a mapping",
    "array": "a list",
    "boolean": "true or false",
    "null": "null",
}


def _kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(str(item) for item in schema["enum"])
    kind = schema.get("type", "another")
    kinds = kind if isinstance(kind, list) else [kind]
    return " or ".join(
        _WORDS.get(name, f"a {name}" if name != "integer" else "a whole number") for name in kinds
    )


def _expected(error: Any) -> str:
    bounds = {
        "minimum": "at least", "maximum": "at most", "exclusiveMinimum": "more than",
        "exclusiveMaximum": "less than", "minLength": "a length of at least",
        "minItems": "a number of items of at least", "maxItems": "a number of items of at most",
    }  # fmt: skip
    if error.validator == "const":
        return json.dumps(error.validator_value)
    if error.validator in ("type", "enum"):
        return _kind(error.schema)
    if error.validator in bounds:
        return f"{bounds[error.validator]} {error.validator_value}"
    return f"{error.validator} {json.dumps(error.validator_value, default=str)[:80]}"


def with_defaults(document: Mapping[str, Any], name: str = "config") -> dict[str, Any]:
    """`document` with every key that it leaves out set to the default that the schema publishes."""
    root = load(name)
    filled: dict[str, Any] = _filled(dict(document), root, root)
    return filled


def _filled(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    schema = _followed(schema, root)
    if not isinstance(value, dict):
        return value
    result = dict(value)
    for key, part in schema.get("properties", {}).items():
        if key not in result and "default" in part:
            result[key] = copy.deepcopy(part["default"])
        elif key not in result and _followed(part, root).get("type") == "object":
            result[key] = {}
        if key in result:
            result[key] = _filled(result[key], part, root)
    return result


def _followed(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        target: Any = root
        for part in str(schema["$ref"]).removeprefix("#/").split("/"):
            target = target[part]
        schema = target
    return schema
