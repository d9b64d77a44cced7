"""YAML read the strict way: safe, JSON types only, and no value that isn't what it looks like.

YAML 1.1 reads `on` as true, `07` as 7, `1e-4` as text and `2026-11-30` as a date. A plain value of such a
kind is refused with what to write instead; between quotes it is text and passes.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from runtime.errors import ConfigError

REMEDY = "mend config.yaml, then finetune plan"
_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+$")
_WORDS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


class _Loader(yaml.SafeLoader):
    """Composes nodes only; aliases are refused, for they make bombs and cycles, and JSON has none."""

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.get_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(
                problem="aliases (*name) are not accepted: write it out", problem_mark=mark
            )
        return super().compose_node(parent, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    line: int
    key: str
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.key or 'top level'}: {self.text}"


def read_document(source: bytes) -> tuple[dict[str, Any], list[Problem]]:
    """The mapping that `source` holds, and the values in it that aren't what they look like (null there).

    Raises ConfigError where it is no YAML mapping.
    """
    try:
        node = _compose(source)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError("config.yaml is not YAML\n" + _syntax(error, source), remedy=REMEDY) from error
    if not isinstance(node, MappingNode):
        raise ConfigError(
            "config.yaml: expected a mapping of sections, saw none", remedy="finetune recommend"
        )
    problems: list[Problem] = []
    document = _mapping(node, "", problems)
    return document, problems


def _compose(source: bytes) -> Node | None:
    loader = _Loader(source)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _syntax(error: Exception, source: bytes) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, yaml.reader.ReaderError) and error.encoding != "unicode":
        return "it is not UTF-8 text: save it as UTF-8"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error).splitlines()[0]
    mark = error.problem_mark
    text = error.problem or "unreadable"
    if "'\\t'" in text or _line(source, mark.line).lstrip(" ").startswith("\t"):
        text = "tabs can't indent: use spaces"
    return f"line {mark.line + 1}, column {mark.column + 1}: {text}"


def _line(source: bytes, number: int) -> str:
    lines = source.decode("utf-8", errors="replace").splitlines()
    return lines[number] if number < len(lines) else ""


def _value(node: Node, path: str, problems: list[Problem]) -> Any:
    if isinstance(node, MappingNode):
        return _mapping(node, path, problems)
    if isinstance(node, SequenceNode):
        if node.tag != _TAG + "seq":
            problems.append(_problem(node, path, f"the tag {node.tag} is not accepted: write a plain list"))
        return [_value(item, f"{path}[{index}]", problems) for index, item in enumerate(node.value)]
    assert isinstance(node, ScalarNode)
    try:
        return _scalar(node)
    except ValueError as error:
        problems.append(_problem(node, path, str(error)))
        return None


def _mapping(node: MappingNode, path: str, problems: list[Problem]) -> dict[str, Any]:
    if node.tag != _TAG + "map":
        problems.append(_problem(node, path, f"the tag {node.tag} is not accepted: write a plain mapping"))
    document: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        key = _key(key_node, path, problems)
        if key is None:
            continue
        dotted = f"{path}.{key}" if path else key
        if key in lines:
            problems.append(_problem(key_node, dotted, f"given twice, first on line {lines[key]}: keep one"))
        lines.setdefault(key, key_node.start_mark.line + 1)
        document[key] = _value(value_node, dotted, problems)
    return document


def _key(node: Node, path: str, problems: list[Problem]) -> str | None:
    if isinstance(node, ScalarNode) and node.tag == _TAG + "str":
        try:
            return str(_scalar(node))
        except ValueError as error:
            problems.append(_problem(node, path, f"key {node.value!r}: {error}"))
            return None
    seen = node.value if isinstance(node, ScalarNode) else "a list or mapping"
    problems.append(_problem(node, path, f"key {seen!r} is read as {_kind(node)}: keys are text"))
    return None


def _kind(node: Node) -> str:
    return str(node.tag).removeprefix(_TAG)


def _problem(node: Node, path: str, text: str) -> Problem:
    return Problem(line=node.start_mark.line + 1, key=path, text=text)


def _scalar(node: ScalarNode) -> Any:
    """The JSON value of a scalar. Raises ValueError that says what to write instead."""
    text = str(node.value)
    readers = {"str": _text, "null": _null, "bool": _bool, "int": _int, "float": _float}
    kind = _kind(node)
    if kind in readers:
        return readers[kind](text, node.style is None)
    if kind == "timestamp":
        raise ValueError(f'{text} is read as a date; for text write "{text}"')
    raise ValueError(f"the tag {node.tag} is not accepted: write a plain value")


def _text(text: str, plain: bool) -> str:
    if plain and _EXPONENT.match(text):
        raise ValueError(
            f"{text} is read as text, for YAML wants a dot and a sign; "
            f'write {_dotted(text)} (or "{text}" for text)'
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is no character") from None
    return text


def _dotted(text: str) -> str:
    mantissa, exponent = re.split("[eE]", text)
    sign = "" if exponent[0] in "+-" else "+"
    return (mantissa if "." in mantissa else mantissa + ".0") + "e" + sign + exponent


def _null(text: str, plain: bool) -> None:
    if text not in ("null", "~", ""):
        raise ValueError(f"{text} is read as null; write null")


def _bool(text: str, plain: bool) -> bool:
    lower = text.lower()
    if lower in _WORDS:
        raise ValueError(f'{text} is read as {_WORDS[lower]}; write {_WORDS[lower]} (or "{text}" for text)')
    if lower not in ("true", "false"):
        raise ValueError(f"saw {text!r}, expected true or false")
    return lower == "true"


def _int(text: str, plain: bool) -> int:
    digits = text.lstrip("+-")
    if len(digits) > 20:
        raise ValueError("a number of more than 20 digits")
    if ":" in digits:
        raise ValueError(f'{text} is read as a number to base 60; for text write "{text}"')
    if re.fullmatch("[0-9]+", digits) is None:
        raise ValueError(f'{text} is not a plain number; write its digits (or "{text}" for text)')
    if len(digits) > 1 and digits[0] == "0":
        octal = set(digits) <= set("01234567")
        seen = f"{int(digits, 8)}, for a leading 0 means octal" if octal else "text"
        raise ValueError(
            f'{text} is read as {seen}; write {digits.lstrip("0") or "0"} (or "{text}" for text)'
        )
    return int(text)


def _float(text: str, plain: bool) -> float:
    if ":" in text:
        raise ValueError(f'{text} is read as a number to base 60; for text write "{text}"')
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        value = math.nan  # .nan and .inf as YAML writes them, or a tag that lies
    if not math.isfinite(value):
        raise ValueError(f"saw {text}, expected a finite number")
    return value
