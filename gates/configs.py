"""Two config documents compared key by key, as a run and its workspace must agree."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any


def without(config: Mapping[str, Any], *dotted: str) -> dict[str, Any]:
    """A copy of `config` that lacks the keys named, each a section or section.key."""
    result = copy.deepcopy(dict(config))
    for name in dotted:
        *parents, last = name.split(".")
        section = _section(result, parents)
        if section is not None:
            section.pop(last, None)
    return result


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` with each dotted key set to its value."""
    result = copy.deepcopy(dict(config))
    for name, value in overrides.items():
        *parents, last = name.split(".")
        section = _section(result, parents)
        if section is not None:
            section[last] = value
    return result


def _section(document: dict[str, Any], names: list[str]) -> dict[str, Any] | None:
    section: Any = document
    for name in names:
        section = section.get(name) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else None


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """`dotted.key: old then, new now` for each leaf that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif old != new:
        yield f"{path}: {old} then, {new} now"


def unresolved(config: Any, resolved: Any, path: str = "") -> Iterator[str]:
    """Leaves in which `resolved` says another value than `config`, where that did not leave it open."""
    if isinstance(config, Mapping) and isinstance(resolved, Mapping):
        for key in sorted(config):
            yield from unresolved(config[key], resolved.get(key), f"{path}.{key}" if path else str(key))
    elif config not in ("auto", None) and config != resolved:
        yield f"{path}: {config} configured, {resolved} used"
