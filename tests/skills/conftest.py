"""The fixtures of tests/gates, and what the tables of faults share."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def _gates_conftest() -> Any:
    path = Path(__file__).resolve().parents[1] / "gates" / "conftest.py"
    spec = importlib.util.spec_from_file_location("gates_conftest", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["gates_conftest"] = module
    spec.loader.exec_module(module)
    return module


_shared = _gates_conftest()
workspaces, _templates, make, made = _shared.workspaces, _shared._templates, _shared.make, _shared.made


@pytest.fixture
def judge() -> Callable[..., Any]:
    """judge(made, "07", require_device=...) -> the verdict of one gate by itself."""
    from gates import chain, registry
    from gates.workspace import Workspace

    def run(made: Any, number: str, **options: Any) -> Any:
        return chain.judge(registry.load(number), Workspace.open(made.root, **options)).whole

    return run


@pytest.fixture
def assert_turned() -> Callable[..., None]:
    """Exactly these checks turned; what else did not pass says that it needs one of them."""

    def check(verdict: Any, *, fail: set[str] = frozenset(), error: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        from gates.verdict import validate

        def name(item: Any) -> str:
            return f"{item.phase}/{item.id}" if item.phase else item.id

        seen = {
            status: {name(c) for c in verdict.checks if c.status == status} for status in ("fail", "error")
        }
        messages = [
            (name(c), c.status, c.message) for c in verdict.checks if c.status not in ("pass", "skip")
        ]
        assert (seen["fail"], seen["error"]) == (set(fail), set(error)), messages
        turned = set(fail) | set(error)
        for item in verdict.checks:
            if item.status == "skip" and not item.excused:
                assert item.message.startswith("not judged: it needs "), item
                assert item.needs and turned
            if item.status in ("fail", "error"):
                assert item.message and item.remedy, item
            if item.status == "fail":
                assert item.title and item.section
        required = [c for c in verdict.checks if c.required and name(c) in turned]
        assert verdict.passes == (not required)
        validate(verdict.to_json())

    return check
