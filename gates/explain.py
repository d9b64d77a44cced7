"""`gate explain`: what a check measures, its thresholds, why, on which files, and what mends it."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from sys import modules
from types import CodeType
from typing import Any

from gates.checks import Spec

_RUN = "run.json, {}, {} and the checkpoints of the newest {} run, or of --run; target.json, config.yaml, 04-plan.json"
# What a gate's `collect` reads, by gate and phase; a check's own place is in its verdict's `evidence`.
EVIDENCE = {
    ("01", None): ".gates/evidence/01-host.json, .gates/target.json",
    ("02", None): ".gates/evidence/02-dataset.json, .gates/target.json, the dataset's own files",
    ("03", None): ".gates/evidence/03-environment.json and 01-host.json, .gates/target.json",
    ("04", None): "config.yaml, .gates/evidence/04-plan.json, 02-dataset.json and 01-host.json, .gates/target.json",
    ("05", None): ".gates/evidence/05-adaptation.json, 03-environment.json and 04-plan.json, config.yaml",
    ("06", None): ".gates/evidence/06-quantize.json and 04-plan.json, models/nf4, .gates/skips/06.json, config.yaml",
    ("07", "cache"): "manifest.json of the cache and each entry, .gates/evidence/07-cache-roundtrip.json and "
    "02-dataset.json, config.yaml",
    ("07", "smoke"): _RUN.format("metrics.jsonl", "saves.jsonl", "smoke"),
    ("07", "full"): _RUN.format("metrics.jsonl, saves.jsonl", "probe.jsonl", "full"),
    ("08", None): ".gates/evidence/08-validation.json and 02-dataset.json, the pictures in validation/, the full run's "
    "run.json, metrics.jsonl, probe.jsonl and saves.jsonl, manifest.json of the cache, config.yaml",
}  # fmt: skip
FOREIGN = "train_config.yaml, events.out.tfevents.* and the checkpoints of the run that --run names"


def document(spec: Spec[Any], evidence: str) -> dict[str, Any]:
    names = ("id", "phase", "title", "section", "why", "measures", "required", "may_skip", "remedy")
    return {
        **{name: getattr(spec, name) for name in names},
        "needs": list(spec.needs),
        "thresholds": thresholds(spec.measure),
        "evidence": evidence,
    }


def text(spec: dict[str, Any]) -> str:
    phase = f" ({spec['phase']})" if spec["phase"] else ""
    limits = [f"{row['name']} {row['value']}{_because(row['why'])}" for row in spec["thresholds"]]
    rows = [
        ("measures", spec["measures"]),
        *[("threshold", limit) for limit in limits],
        ("because", spec["why"]),
        ("evidence", spec["evidence"]),
        ("mend", spec["remedy"]),
        ("needs", ", ".join(spec["needs"])),
        ("may skip", f"if {spec['may_skip']}" if spec["may_skip"] else ""),
        ("advisory", "" if spec["required"] else "it never fails the gate, unless --strict"),
        ("section", spec["section"]),
    ]
    lines = [f"{spec['id']}{phase}: {spec['title']}"]
    return "\n".join(lines + [f"  {name:<9} {value}" for name, value in rows if value])


def _because(why: str) -> str:
    return f": {why}" if why else ""


def thresholds(measure: Callable[..., Any]) -> list[dict[str, str]]:
    """The named numbers that `measure`, and its module's functions that it calls, compare with; and their reasons.

    Read from the functions, so that what is told can't differ from what is judged.
    """
    found: dict[str, dict[str, str]] = {}
    for function in _reached(measure):
        for name in _names(function.__code__):
            value = function.__globals__.get(name)
            if "_" in name and name.isupper() and (told := _told(value)):
                found[name] = {"name": name, "value": told, "why": _reason(function.__module__, name)}
    return list(found.values())


def _told(value: Any) -> str:
    if type(value) in (int, float):
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    if isinstance(value, dict) and value and all(map(_told, value.values())):
        nested = any(isinstance(item, dict) for item in value.values())
        return ("; " if nested else ", ").join(f"{key} {_told(item)}" for key, item in value.items())
    return ""


def _reached(measure: Any) -> list[Any]:
    reached, waiting = [], [measure]
    while waiting:
        function = waiting.pop()
        reached.append(function)
        called = (function.__globals__.get(name) for name in _names(function.__code__))
        waiting += [
            other
            for other in called
            if hasattr(other, "__code__")
            and other.__module__ == measure.__module__
            and other not in reached + waiting
        ]
    return reached


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _reason(module: str, name: str) -> str:
    """The comment behind or above the constant, in its module or one that it imports from; "" if it has none."""
    for source in _sources(module):
        match = re.search(rf"^{name}\b(?:[^#\n]*|[^#\n]*\(\n[^#\n]*)#\s*(.+)$", source, re.MULTILINE)
        match = match or re.search(rf"^# (.+)\n{name}\b", source, re.MULTILINE)
        if match:
            return match[1].strip()
    return ""


@cache
def _sources(module: str) -> list[str]:
    own = _source(module)
    return [own, *map(_source, re.findall(r"^from (gates\.[\w.]*) import", own, re.MULTILINE))]


def _source(module: str) -> str:
    return Path(str(modules[module].__file__)).read_text(encoding="utf-8")
