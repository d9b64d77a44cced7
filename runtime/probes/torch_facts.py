"""What torch sees, asked once in a child: both steps need it, and the parent never imports torch."""

from typing import Any

from runtime.probes import child
from runtime.probes.child import Outcome

LIMIT_S = 120.0  # a first start reads a gigabyte of libraries, on Windows past a virus scanner


def collect(limit_s: float = LIMIT_S) -> dict[str, Any]:
    return to_json(child.ask("torch_facts", limit_s=limit_s))


def to_json(outcome: Outcome) -> dict[str, Any]:
    """The finding, and what torch had said when the child ended, however it ended."""
    nothing = {"available": False, "devices": []}
    return {
        **outcome.to_json(),
        "version": outcome.answer.get("version"),
        "built": outcome.answer.get("built", {"xpu": None, "cuda": None, "hip": None}),
        "xpu": outcome.answer.get("xpu", nothing),
        "cuda": outcome.answer.get("cuda", nothing),
    }


def accelerator(facts: dict[str, Any]) -> str | None:
    """xpu or cuda where torch sees one; a build has at most one of the two."""
    return next((name for name in ("xpu", "cuda") if facts[name]["available"]), None)
