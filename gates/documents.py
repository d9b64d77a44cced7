"""config.yaml read the strict way: JSON types only, and no value that isn't what it looks like."""

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from gates.evidence import EvidenceError, read_bytes

_TAG = "tag:yaml.org,2002:"
_WORDS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


class _Loader(yaml.SafeLoader):
    """Aliases are refused: they make bombs and cycles, and JSON has none."""

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise EvidenceError(f"line {mark.line + 1}", "aliases (*name) are not accepted: write it out")
        return super().compose_node(parent, index)


def read_yaml(path: Path, shown: str) -> tuple[dict[str, Any], list[str]]:
    """The document, and one line for each of YAML's traps in it. Raises EvidenceError if it is none."""
    source = read_bytes(path, shown)
    try:
        loader = _Loader(source)
        try:
            node = loader.get_single_node()
            traps = list(_traps(node, "")) if node else []
            document = loader.construct_document(node) if node else None
        finally:
            loader.dispose()
    except EvidenceError as error:
        raise EvidenceError(shown, f"{error.path}: {error.message}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise EvidenceError(shown, f"is not YAML: {_syntax(error)}") from error
    if not isinstance(document, dict):
        raise EvidenceError(shown, "is no mapping of sections")
    return document, traps


def _syntax(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    lines = str(error).splitlines()
    return lines[0] if lines else "nested too deeply"


def _traps(node: Node, path: str) -> list[str]:
    if isinstance(node, MappingNode):
        return _mapping_traps(node, path)
    if isinstance(node, SequenceNode):
        return [line for index, item in enumerate(node.value) for line in _traps(item, f"{path}[{index}]")]
    assert isinstance(node, ScalarNode)
    trap = _scalar_trap(node)
    return [f"line {node.start_mark.line + 1}: {path}: {trap}"] if trap else []


def _mapping_traps(node: MappingNode, path: str) -> list[str]:
    found: list[str] = []
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, ScalarNode) or key.tag != _TAG + "str":
            raise EvidenceError(f"line {key.start_mark.line + 1}", "keys are text")
        dotted = f"{path}.{key.value}" if path else str(key.value)
        if key.value in seen:
            raise EvidenceError(f"line {key.start_mark.line + 1}", f"the key {dotted} is given twice")
        seen.add(key.value)
        found += _traps(value, dotted)
    return found


def _scalar_trap(node: ScalarNode) -> str:
    """Why the plain scalar isn't what it looks like, and what to write instead; empty if it is."""
    text, kind = str(node.value), str(node.tag).removeprefix(_TAG)
    if kind not in ("str", "null", "bool", "int", "float"):
        return f'{text} is read as a {kind}; for text write "{text}"'
    if node.style is not None:
        return ""
    if kind == "bool" and text.lower() in _WORDS:
        return f"{text} is read as {_WORDS[text.lower()]}; write that"
    if kind == "str" and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", text):
        mantissa, exponent = re.split("[eE]", text)
        mantissa = mantissa if "." in mantissa else mantissa + ".0"
        sign = "" if exponent[0] in "+-" else "+"
        return f"{text} is read as text, for YAML wants a dot; write {mantissa}e{sign}{exponent}"
    if kind == "int" and not re.fullmatch(r"[-+]?(0|[1-9]\d*)", text):
        return f'{text} is not the number that it looks like; write its digits (or "{text}" for text)'
    if kind == "float" and (":" in text or re.search("nan|inf", text.lower())):
        return f"{text} is no finite number"
    return ""
