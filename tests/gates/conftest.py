"""Healthy workspaces, made once and copied for each test that spoils one."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def load_workspaces() -> ModuleType:
    """The synthetic workspaces of `gate selftest`, and what makes their parts, as one module."""
    from gates.selftest import editing, fits, healthy, machines, nf4

    module = ModuleType("synthetic_workspaces")
    for part in (editing, fits, machines, healthy):
        vars(module).update({name: item for name, item in vars(part).items() if not name.startswith("__")})
    sys.modules["synthetic_nf4"] = nf4
    return module


@pytest.fixture(scope="session")
def workspaces() -> ModuleType:
    return load_workspaces()


@pytest.fixture(scope="session")
def _templates(tmp_path_factory: pytest.TempPathFactory, workspaces: ModuleType) -> dict[str, Path]:
    roots = {device: tmp_path_factory.mktemp(device) / "ws" for device in ("cpu", "xpu", "cuda")}
    for device, root in roots.items():
        workspaces.healthy(root, device)
    return roots


@pytest.fixture
def make(_templates: dict[str, Path], tmp_path: Path, workspaces: ModuleType) -> Callable[..., Any]:
    """make(device="cpu") -> a fresh healthy workspace."""

    def copy(device: str = "cpu") -> Any:
        root = tmp_path / "ws"
        shutil.copytree(_templates[device], root)
        return workspaces.Made(root)

    return copy


@pytest.fixture
def made(make: Callable[..., Any]) -> Any:
    return make()
